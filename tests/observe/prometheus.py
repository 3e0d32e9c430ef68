"""A real Prometheus (Debian's package) with the committed configuration and rules, at a quicker pace."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

from needs import needs
from swarm.harness import PATIENCE, REPOSITORY, until

from .web import get, get_json

DOCKER = REPOSITORY / "docker"
RULES = DOCKER / "prometheus" / "rules.yml"
_MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
with_prometheus = needs(
    not _MISSING, f"there is no {' and no '.join(_MISSING)} here (Debian: apt-get install prometheus)"
)


def promtool(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * PATIENCE,
    )


def in_seconds(rules: str) -> str:
    """The rules with a second for every minute: what they say in minutes and hours, and the only number of seconds."""

    def shorter(found: re.Match[str]) -> str:
        return f"{int(found[1]) * (60 if found[2] == 'h' else 1)}s"

    assert rules.count("> 600)") == 1
    return re.sub(r"\b([0-9]+)([mh])\b", shorter, rules).replace("> 600)", "> 10)")


class Prometheus:
    """Watches the coordinator whose page is at `page`, and through it all peers; looks once a second."""

    def __init__(self, place: Path, page: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        config = (DOCKER / "prometheus" / "prometheus.yml").read_text()
        address = page.removeprefix("http://").removesuffix("/")
        assert config.count("coordinator:8080") == 2
        config = config.replace("coordinator:8080", address).replace(": 5s", ": 1s")
        (place / "prometheus.yml").write_text(config)
        (place / "rules.yml").write_text(in_seconds(RULES.read_text()))
        self._log = (place / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={place / 'prometheus.yml'}",
                f"--storage.tsdb.path={place / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        until(self._is_ready, "Prometheus is ready", timeout_s=30)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        try:
            return get(self.url + "/-/ready")[0] == 200
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = get_json(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        assert answer["status"] == "success"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def label_values(self, query: str) -> list[str]:
        """What Grafana makes of `label_values(METRIC, LABEL)`."""
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match is not None, query
        chosen = urllib.parse.urlencode({"match[]": match[1]})
        found: list[str] = get_json(f"{self.url}/api/v1/label/{match[2]}/values?{chosen}")["data"]
        return found

    def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire, by name."""
        alerts = get_json(self.url + "/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    def wait_firing(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """The alert, as soon as it fires."""
        until(lambda: name in self.firing(), f"{name} fires", timeout_s=timeout_s)
        return self.firing()[name]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20 * PATIENCE)
        self._log.close()
