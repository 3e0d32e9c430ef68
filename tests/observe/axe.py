"""axe-core in the page of a test, put there through the debugging pipe: the page's own policy stops nothing there."""

from __future__ import annotations

import json
from pathlib import Path

from .browser import Browser

_HERE = Path(__file__).parent
_SOURCE = _HERE / "node_modules" / "axe-core" / "axe.min.js"
VERSION = json.loads((_HERE / "package.json").read_text())["dependencies"]["axe-core"]
IS_HERE = _SOURCE.exists()
WHY_NOT = "axe-core is not installed here (npm install --prefix tests/observe --no-package-lock)"
_RUN = """axe.run(document, {resultTypes: ["violations"], preload: false}).then((found) => ({
  checked: found.passes.length, version: axe.version,
  faults: found.violations.map((item) =>
    `${item.impact} ${item.id}: ${item.nodes.map((node) => node.html.slice(0, 90))}`),
}))"""


def faults(browser: Browser) -> list[str]:
    """Every rule that the page breaks, with its impact, its name and where."""
    if not browser.evaluate("typeof axe === 'object'"):
        browser.evaluate(_SOURCE.read_text() + "; true")
    found = browser.evaluate(_RUN)
    assert found["version"] == VERSION
    assert found["checked"] > 15, "axe looked at hardly anything"
    listed: list[str] = found["faults"]
    return listed
