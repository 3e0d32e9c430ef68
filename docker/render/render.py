"""Draws every dashboard from a Prometheus's data with Grafana's own panel components, in a headless browser.

    python docker/render/render.py http://localhost:9090 docs/ [--seconds 300]

Needs node, npm and Chromium; the first time it downloads Grafana's libraries (600 MB) into a cache directory. It shows
panels and queries as Grafana draws them; it is not Grafana: variables are filled in with "all".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.observe.browser import Browser  # noqa: E402

WIDTH = 1400
ASSETS = ("svg", "woff", "woff2", "png", "ttf", "gif")


def bundle(cache: Path) -> Path:
    """The program for the browser, in one file."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "app.jsx"):
        shutil.copy(HERE / name, cache / name)
    if not (cache / "node_modules" / "@grafana" / "ui").exists():
        subprocess.run(["npm", "install", "--legacy-peer-deps", "--no-audit", "--no-fund"], cwd=cache, check=True)
    loaders = [f"--loader:.{kind}=dataurl" for kind in ASSETS]
    defines = ['--define:process.env.NODE_ENV="production"', "--define:global=window"]
    command = ["npx", "esbuild", "app.jsx", "--bundle", "--outfile=out/app.js", "--jsx=automatic", "--log-level=error"]
    subprocess.run([*command, *loaders, *defines], cwd=cache, check=True)
    return cache / "out" / "app.js"


def series(url: str, expr: str, began: float, ended: float) -> list[dict[str, Any]]:
    """What Prometheus has, over time."""
    filled = expr.replace("$__rate_interval", "15s").replace("$stage", ".*").replace("$name", ".*")
    query = urllib.parse.urlencode(
        {"query": filled, "start": began, "end": ended, "step": max(1, (ended - began) / 300)}
    )
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:
        result: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
    return result


def instant(url: str, expr: str, at: float) -> list[dict[str, Any]]:
    """What Prometheus has now, in the form of series of one value."""
    found = series(url, expr, at, at)
    return [{**item, "values": item["values"][-1:]} for item in found]


def page(board: dict[str, Any], url: str, seconds: float, program: Path) -> str:
    """A page that draws one dashboard."""
    ended = time.time()
    data = {
        panel["id"]: [
            series(url, target["expr"], ended - seconds, ended)
            if target["range"]
            else instant(url, target["expr"], ended)
            for target in panel["targets"]
        ]
        for panel in board["panels"]
    }
    content = json.dumps({"board": board, "data": data, "from": ended - seconds, "to": ended}).replace("<", "\\u003c")
    scripts = f'<script>window.board = {content};</script><script src="{program.as_uri()}"></script>'
    style = f'<link rel="stylesheet" href="{program.with_suffix(".css").as_uri()}">'
    return f'<!doctype html><meta charset="utf-8">{style}<body><div id="root"></div>{scripts}'


def main() -> int:
    """Draw all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("prometheus")
    options.add_argument("out", type=Path)
    options.add_argument("--seconds", type=float, default=300.0)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    options.add_argument("--cache", type=Path, default=home / "swarmtrain" / "render")
    arguments = options.parse_args()
    program = bundle(arguments.cache)
    missing = 0
    with Browser() as browser:
        for path in sorted((HERE.parent / "grafana" / "dashboards").glob("*.json")):
            board = json.loads(path.read_text())
            rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
            browser.look(WIDTH, 70 + 34 * rows, dark=True)
            file = arguments.cache / f"{path.stem}.html"
            file.write_text(page(board, arguments.prometheus.rstrip("/"), arguments.seconds, program))
            browser.open(file.as_uri())
            try:
                browser.wait("window.isDrawn && document.querySelectorAll('canvas').length > 0", timeout_s=60)
            except AssertionError:
                print(f"{path.stem} is not drawn: {browser.problems[:3]}")
                return 1
            time.sleep(2)  # plots draw in steps, and say nothing when they are done
            empty = int(browser.evaluate("document.querySelectorAll('.nodata').length"))
            missing += empty
            browser.screenshot(arguments.out / f"dashboard-{path.stem}.png", whole=False)
            print(f"{path.stem}: {len(board['panels'])} panels, {empty} without data; {len(browser.problems)} problems")
            for problem in browser.problems[:3]:
                print(f"  {problem[:300]}")
            browser.problems.clear()
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
