"""The files in docker/ as far as they can be checked without building: style, schema, and that they fit the program.

scripts: docker/try builds the image and trains in containers; it takes minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from needs import missing
from swarm.harness import REPOSITORY, clean_environment
from typer.main import get_command

from swarmtrain.cli.main import app
from swarmtrain.observe.http import HttpServer, Response

DOCKER = REPOSITORY / "docker"
TOOLS = Path(sys.executable).parent


def tool(name: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    program = TOOLS / name
    if not program.exists():
        missing(f"{name} is not installed beside this Python; scripts/test does it")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)


def test_the_dockerfile_has_good_style(tmp_path: Path) -> None:
    done = tool("hadolint", DOCKER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN cd /tmp && apt-get install curl\n")
    assert tool("hadolint", bad).returncode == 1


def test_the_compose_file_follows_the_specification(tmp_path: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    done = tool("check-jsonschema", *schema, DOCKER / "compose.yaml")
    assert done.returncode == 0, done.stdout
    bad = tmp_path / "compose.yaml"
    bad.write_text((DOCKER / "compose.yaml").read_text().replace("depends_on:", "depend_on:"))
    assert tool("check-jsonschema", *schema, bad).returncode == 1


def test_every_option_in_the_compose_file_exists() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {name: {opt for item in commands[name].params for opt in item.opts} for name in ("coordinator", "join")}
    services = re.split(r"\n  (?=\w+:\n)", text)
    used = {
        verb: {option for part in services if marker in part for option in re.findall(r"(?<![\w-])--[a-z-]+", part)}
        for verb, marker in (("coordinator", "\n      - coordinator\n"), ("join", "swarmtrain join"))
    }
    assert used["coordinator"] >= {"--page", "--invite-file", "--listen"}
    assert used["join"] >= {"--stage", "--metrics", "--metrics-announce"}
    for verb, options in used.items():
        assert options <= known[verb], (verb, options - known[verb])


def test_every_file_that_the_compose_file_mounts_or_builds_from_is_there() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    mounted = dict(re.findall(r"^\s+- (\./\S+?):(/\S+?):ro$", text, re.MULTILINE))
    assert set(mounted.values()) == {"/etc/prometheus", "/etc/grafana/provisioning", "/var/lib/grafana/dashboards"}
    for source in mounted:
        assert (DOCKER / source).is_dir(), source
    (dockerfile,) = re.findall(r"dockerfile: (\S+)", text)
    assert (REPOSITORY / dockerfile).is_file()
    (home,) = re.findall(r"HOME_DASHBOARD_PATH: (\S+)", text)
    assert (DOCKER / "grafana" / "dashboards" / Path(home).name).is_file()
    provider = (DOCKER / "grafana" / "provisioning" / "dashboards" / "dashboards.yaml").read_text()
    assert f"path: {Path(home).parent}" in provider
    (source,) = re.findall(
        r"url: http://(\w+):9090", (DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )
    assert f"\n  {source}:\n" in text  # the name of a service


def test_peers_elsewhere_can_reach_the_run_and_containers_keep_their_identity() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    (listens,) = re.findall(r"--listen=/ip4/0.0.0.0/tcp/(\d+)", text)
    assert f'- "{listens}:{listens}"' in text
    build_arguments = set(re.findall(r"^ARG (\w+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^        (\w+): \$\{", text, re.MULTILINE)) == build_arguments
    volumes = set(re.findall(r"^  (\w+):$", text.split("\nvolumes:\n")[1], re.MULTILINE))
    used = set(re.findall(r"^\s+- (\w+):/", text, re.MULTILINE))
    assert used == volumes >= {"peers", "run"}
    assert "capabilities: [gpu]" in text
    assert "--gpu 0" in text


def test_the_image_runs_as_nobody_in_particular() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert text.index("USER 10001") < text.index("ENTRYPOINT")
    assert "HEALTHCHECK" in text


def health(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmtrain.observe.health"],
        capture_output=True, text=True, check=False, timeout=60, cwd=REPOSITORY,
        env=clean_environment({"SWARMTRAIN_HEALTH_URL": url}),
    )  # fmt: skip


def test_the_health_check_says_no_to_nobody_and_yes_to_a_daemon() -> None:
    import asyncio

    async def ask() -> tuple[int, int]:
        server = HttpServer({"/healthz": lambda _: Response(b"serving\n")})
        await server.start("127.0.0.1", 0)
        well = await asyncio.to_thread(health, f"http://{server.address}/healthz")
        await server.close()
        gone = await asyncio.to_thread(health, f"http://{server.address}/healthz")
        assert well.stdout == "serving\n"
        assert "no answer from" in gone.stderr
        return well.returncode, gone.returncode

    assert asyncio.run(ask()) == (0, 1)


def test_shell_scripts_are_shell(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash
    for script in DOCKER.glob("try*"):
        assert subprocess.run([bash, "-n", script], check=False).returncode == 0
