"""The volunteer's own page, in a real browser on a real peer: it tells, changes and keeps; and nobody else may ask."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs
from swarm.harness import PACE, PATIENCE, Daemon, Swarm, ask_daemon, swarmtrain, tiny, until

from . import axe
from .browser import PROGRAM, WHY_NOT, Browser

pytestmark = [pytest.mark.swarm, needs(PROGRAM is not None, WHY_NOT)]

SIZES = [(1280, 900, False), (360, 740, True)]
FAULTS = (Path(__file__).parent / "accessibility.js").read_text()


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    manifest = tiny("schedule.steps=1000000", "stages.count=2", "model.num_layers=2")
    with Swarm(manifest, shared_place, num_peers=3, pace=PACE) as swarm:
        swarm.wait_step(2)
        yield swarm


@pytest.fixture
def peer(swarm: Swarm) -> Daemon:
    """The second replica of the first stage: the run goes on without it."""
    return swarm.peers[2]


@pytest.fixture
def page(swarm: Swarm, peer: Daemon) -> str:
    done = swarmtrain("page", "--state-dir", str(peer.state_dir))
    assert done.returncode == 0
    return done.stdout.strip()


@pytest.fixture(scope="module")
def browser(swarm: Swarm) -> Iterator[Browser]:
    with Browser() as browser:
        browser.look(1280, 900)
        yield browser


def opened(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.wait("document.getElementById('share')?.textContent.includes('%')", timeout_s=60 * PATIENCE)


def refused(url: str, body: bytes | None = None, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, named), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_pauses_and_resumes_the_peer(browser: Browser, page: str, peer: Daemon) -> None:
    opened(browser, page)
    browser.wait("!document.getElementById('pause').disabled", timeout_s=60 * PATIENCE)
    browser.evaluate("document.getElementById('pause').click()")
    until(lambda: ask_daemon(peer.state_dir, "status")["state"] == "paused", "it is paused")
    browser.wait("document.getElementById('why').textContent.includes('paused by its owner')", timeout_s=60 * PATIENCE)
    browser.wait("!document.getElementById('resume').disabled", timeout_s=60 * PATIENCE)
    browser.evaluate("document.getElementById('resume').click()")
    until(lambda: ask_daemon(peer.state_dir, "status")["state"] == "serving", "it serves again")
    assert browser.problems == []


def test_limits_that_are_changed_hold_at_once_and_at_the_next_start(
    browser: Browser, page: str, peer: Daemon, swarm: Swarm
) -> None:
    opened(browser, page)
    fill = "(name, text) => { document.getElementById(name).value = text; }"
    browser.evaluate(f"({fill})('max_up', '7mbit')")
    browser.evaluate(f"({fill})('hours', 'never')")
    browser.evaluate("document.getElementById('limits').requestSubmit()")
    browser.wait(
        "document.getElementById('saved').textContent.includes('not hours of the day')", timeout_s=60 * PATIENCE
    )
    assert not (peer.state_dir / "owner.json").exists()
    browser.problems.clear()  # Chromium reports the refusal
    browser.evaluate(f"({fill})('hours', '00:00-24:00'.replace('24:00', '23:59') + ', 23:59-24:00')")
    browser.evaluate("document.getElementById('limits').requestSubmit()")
    browser.wait("document.getElementById('saved').textContent === 'Saved.'", timeout_s=60 * PATIENCE)
    kept = json.loads((peer.state_dir / "owner.json").read_text())
    assert (kept["max_up"], kept["max_down"]) == ("7mbit", None)
    peer.kill()
    again = swarm.start_peer(0, name=peer.name)
    until(lambda: (again.state_dir / "control.sock").exists() and again.has("phase_reached", phase="serving"), "serves")
    url = ask_daemon(again.state_dir, "page")["url"]
    assert url == page, "an open page finds it again"
    with urllib.request.urlopen(f"{url}api", timeout=60) as answer:
        found = json.load(answer)
    assert found["settings"]["in_force"]["max_up"] == "7mbit"
    assert found["settings"]["in_force"]["hours"] == "00:00-23:59, 23:59-24:00"
    assert browser.problems == [] or all("ERR_CONNECTION" in problem for problem in browser.problems)
    browser.problems.clear()


def test_nobody_else_may_ask(page: str) -> None:
    origin = page[: page.index("/", 8)]
    other = page.replace(page.rstrip("/").rpartition("/")[2], 32 * "0")
    assert refused(page) == 200
    assert refused(other) == 404, "the token is wrong"
    assert refused(origin) == 404
    assert refused(page, Host="attacker.example") == 421, "a name that an attacker's DNS gives to this address"
    assert refused(f"{page}pause", b"{}", Origin="http://attacker.example") == 403
    assert refused(f"{page}pause", b"{}") == 403, "without an origin"
    assert refused(f"{page}pause", b"{}", Origin=origin, Host="attacker.example") == 421
    assert refused(f"{page}pause", Origin=origin) == 404, "GET changes nothing"
    assert refused(f"{other}pause", b"{}", Origin=origin) == 404
    assert refused(f"{page}change", b"[]", Origin=origin) == 400
    assert refused(f"{page}change", b'{"nice": "0"}', Origin=origin) == 400
    assert refused(f"{page}change", b"x" * 5000, Origin=origin) == 413
    assert refused(f"{page}change", b"{}", Origin=origin) == 200


def test_the_token_is_nowhere_else(page: str, peer: Daemon) -> None:
    token = page.rstrip("/").rpartition("/")[2]
    path = peer.state_dir / "own-page-token"
    assert path.read_text().strip() == token
    assert path.stat().st_mode & 0o077 == 0
    assert token not in json.dumps(ask_daemon(peer.state_dir, "status"))
    assert token not in (peer.state_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height", "phone"), SIZES, ids=["desktop", "phone"])
def test_it_is_readable(browser: Browser, page: str, dark: bool, width: int, height: int, phone: bool) -> None:
    browser.look(width, height, dark=dark, phone=phone)
    opened(browser, page)
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.evaluate(FAULTS) == []
    if axe.IS_HERE:
        assert axe.faults(browser) == []
    assert browser.problems == []
    assert all(url.startswith((page, "data:")) for url in browser.requests if "127.0.0.1" not in url)


def test_every_control_can_be_reached_by_the_keyboard(browser: Browser, page: str) -> None:
    browser.look(1280, 900)
    opened(browser, page)
    browser.wait("!document.getElementById('pause').disabled", timeout_s=60 * PATIENCE)
    reached = set()
    for _ in range(12):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.id || document.activeElement.type || ''"))
    assert {"pause", "hours", "only_when_idle", "max_up", "max_down", "max_traffic", "submit"} <= reached
