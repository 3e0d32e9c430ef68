"""The status page in a real browser, on a real run: quick, live, honest about trouble, usable without a mouse."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs
from swarm.harness import PACE, PATIENCE, Swarm, tiny

from . import axe
from .browser import PROGRAM, WHY_NOT, Browser
from .web import get, get_json

pytestmark = [pytest.mark.swarm, needs(PROGRAM is not None, WHY_NOT)]

PICTURES = os.environ.get("SWARMTRAIN_TEST_PICTURES")  # a directory: the page's pictures for docs/ are written there

with_axe = needs(axe.IS_HERE, axe.WHY_NOT)
SIZES = [(1280, 900, False), (360, 740, True)]  # a desktop and a phone
FAULTS = (Path(__file__).parent / "accessibility.js").read_text()


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    manifest = tiny("schedule.steps=1000000", "stages.count=3", "validation.every=5", "checkpoint.every=10")
    everybody = {"SWARMTRAIN_COORDINATOR_PUBLIC_PAGE": "127.0.0.1:0", "SWARMTRAIN_COORDINATOR_SAMPLES": "8"}
    with Swarm(manifest, shared_place, num_peers=4, pace=PACE, environment=everybody) as swarm:
        swarm.wait_step(12)
        yield swarm


@pytest.fixture(scope="module")
def page(swarm: Swarm) -> str:
    return (swarm.coordinator_dir / "page").read_text().strip()


@pytest.fixture(scope="module")
def browser(swarm: Swarm) -> Iterator[Browser]:
    with Browser() as browser:
        browser.look(1280, 900)
        yield browser


def text(browser: Browser, item: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{item}').textContent"))


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.screenshot(Path(PICTURES) / name)


def test_the_first_content_comes_within_a_second(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.wait("document.getElementById('loss')?.textContent.length > 3", timeout_s=20 * PATIENCE)
    browser.wait("performance.getEntriesByName('first-contentful-paint').length > 0", timeout_s=20 * PATIENCE)
    painted = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted < 1000 * PATIENCE


def test_it_shows_the_run_and_goes_on_without_a_reload(browser: Browser, swarm: Swarm) -> None:
    browser.evaluate("window.isSamePage = true")
    before = int(text(browser, "step").split("/")[0])
    browser.wait(f"parseInt(document.getElementById('step').textContent) > {before + 2}", timeout_s=30 * PATIENCE)
    assert browser.evaluate("window.isSamePage")
    for what in (
        "document.getElementById('state-word').textContent == 'training'",
        "document.getElementById('peers').textContent == '4 of 4'",  # one that was slow may have to fetch its state
        "document.querySelectorAll('#pipeline .peer').length == 4",
        "document.querySelectorAll('#pipeline .way').length >= 3",
    ):
        browser.wait(what, timeout_s=30 * PATIENCE)
    assert browser.evaluate("document.querySelector('#curve .line').getAttribute('d').length") > 50
    assert browser.evaluate("document.querySelector('#speed .line') !== null")
    # what peers tell now and then
    browser.wait("document.querySelectorAll('#spent .part').length == 5", timeout_s=30 * PATIENCE)
    assert f"swarmtrain join {swarm.invite()}" in text(browser, "join")
    assert "\n" not in text(browser, "join")
    assert "serves stage 2" in text(browser, "events")


def test_charts_have_round_ticks_and_say_what_a_point_is(browser: Browser) -> None:
    browser.look(1280, 900)
    ticks = browser.evaluate("[...document.querySelectorAll('#curve .tick')].map((item) => Number(item.textContent))")
    assert len(ticks) >= 2
    apart = {after - before for before, after in itertools.pairwise(ticks)}
    assert len(apart) == 1
    assert all(tick % apart.copy().pop() == 0 for tick in ticks)
    box = "const box = document.getElementById('curve').getBoundingClientRect();"
    move = "document.getElementById('curve').dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 60}))"
    browser.evaluate(f"(() => {{ {box} {move} }})()")
    assert re.match(r"step \d+: loss \d\.\d{4}", text(browser, "curve-at"))
    assert browser.evaluate("document.querySelectorAll('#curve .cursor').length") == 1
    browser.evaluate("document.getElementById('curve').dispatchEvent(new PointerEvent('pointerleave'))")
    assert text(browser, "curve-at") == ""
    key = "document.getElementById('speed').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    browser.evaluate(key)
    latest = int(text(browser, "speed-at").split(":")[0].split()[1])
    browser.evaluate(key)
    assert 0 < int(text(browser, "speed-at").split(":")[0].split()[1]) < latest


@pytest.mark.parametrize(
    ("low", "high", "ticks", "decimals"),
    [(0.0, 1.0, [0, 0.5, 1], 1), (2.13, 6.28, [4, 6], 0), (997.0, 1003.0, [998, 1000, 1002], 0),
     (0.00011, 0.00042, [0.0002, 0.0004], 4)],
)  # fmt: skip
def test_ticks_are_one_two_or_five_times_a_power_of_ten(
    browser: Browser, low: float, high: float, ticks: list[float], decimals: int
) -> None:
    found = browser.evaluate(f"import('./charts.js').then((charts) => charts.roundTicks({low}, {high}, 3))")
    assert found["ticks"] == pytest.approx(ticks)
    assert found["decimals"] == decimals


def test_contributors_are_ranked_as_the_status_says(browser: Browser, swarm: Swarm) -> None:
    rows = "[...document.querySelectorAll('#given tr')].map((row) => [...row.children].map((cell) => cell.textContent))"
    found = browser.evaluate(rows)
    known = {f"{item['name']} ({item['peer'][-8:]})" for item in swarm.coordinator.status()["contributors"]}
    assert {row[1] for row in found} == known
    assert [row[0] for row in found] == [str(rank) for rank in range(1, len(found) + 1)]
    counts = [int(row[2].replace(",", "")) for row in found]
    assert counts == sorted(counts, reverse=True)
    assert sum(float(row[5].removesuffix(" %")) for row in found) == pytest.approx(100, abs=1)


def test_a_checkpoint_can_be_downloaded_from_the_operators_page(browser: Browser, swarm: Swarm, page: str) -> None:
    browser.wait("document.querySelectorAll('.checkpoint').length > 0", timeout_s=60 * PATIENCE)
    listed = get_json(page + "api/checkpoints")
    newest = listed[0]
    (stage,) = [file for file in newest["files"] if file["name"] == "stage-001.safetensors"]
    with urllib.request.urlopen(f"{page}checkpoint?step={newest['step']}&file={stage['name']}", timeout=90) as answer:
        content = answer.read()
        assert answer.headers["Content-Disposition"] == 'attachment; filename="stage-001.safetensors"'
    assert len(content) == stage["bytes"]
    assert hashlib.sha256(content).hexdigest() == stage["sha256"]
    assert browser.evaluate("document.querySelector('.checkpoint a').href").startswith(f"{page}checkpoint?step=")


def test_nothing_is_fetched_from_elsewhere_and_nothing_goes_wrong(browser: Browser, page: str) -> None:
    assert len(browser.requests) >= 5
    assert [url for url in browser.requests if not url.startswith((page, "about:"))] == []
    assert browser.problems == []


@pytest.mark.parametrize(("width", "height", "phone"), SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_accessible_in_every_size_and_colour(
    browser: Browser, width: int, height: int, phone: bool, dark: bool
) -> None:
    browser.look(width, height, dark=dark, phone=phone)
    browser.wait(f"innerWidth === {width}", timeout_s=10 * PATIENCE)
    before = int(text(browser, "step").split("/")[0])  # with the next step everything is drawn in this size
    browser.wait(f"parseInt(document.getElementById('step').textContent) > {before}", timeout_s=30 * PATIENCE)
    assert browser.evaluate(FAULTS) == []
    picture(browser, f"page-{'phone' if phone else 'desktop'}-{'dark' if dark else 'light'}.png")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("const b = document.createElement('button'); document.body.append(b)", "no name"),
        ("const p = document.createElement('p'); p.textContent = 'x'; p.style.color = '#888';"
         "p.style.background = '#999'; document.body.append(p)", "contrast"),
        ("const d = document.createElement('div'); d.id = 'step'; document.body.append(d)", "twice"),
        ("const h = document.createElement('h1'); h.textContent = 'x'; document.body.append(h)", "h1"),
        ("const w = document.createElement('div'); w.style.width = '9000px'; w.style.height = '1px';"
         "document.body.append(w)", "wider"),
    ],
)  # fmt: skip
def test_the_check_of_accessibility_sees_planted_faults(browser: Browser, fault: str, named: str) -> None:
    browser.evaluate(f"(() => {{ {fault} }})()")
    found = browser.evaluate(FAULTS)
    browser.evaluate("document.body.lastElementChild.remove()")
    assert any(named in item for item in found), found
    assert browser.evaluate(FAULTS) == []


def test_a_long_wait_for_an_all_reduce_is_told_on_a_phone_without_widening_the_page(browser: Browser) -> None:
    browser.look(360, 740, phone=True)
    browser.wait("innerWidth === 360", timeout_s=10 * PATIENCE)
    told = "document.querySelector('#split-text .sentence')"
    browser.wait(f"{told} !== null", timeout_s=30 * PATIENCE)  # without a delay every step waits
    with_hours = "waits for the all-reduce of stage 1023: 12345.6 of 23456.7 s"
    widened = f"(() => {{ {told}.textContent = '{with_hours}'; return document.documentElement.scrollWidth > 360; }})()"
    assert browser.evaluate(widened) is False


@with_axe
@pytest.mark.parametrize(("width", "height", "phone"), SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_fault(browser: Browser, width: int, height: int, phone: bool, dark: bool) -> None:
    browser.look(width, height, dark=dark, phone=phone)
    browser.wait(f"innerWidth === {width}", timeout_s=10 * PATIENCE)
    assert axe.faults(browser) == []


@with_axe
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("<button></button>", "critical button-name"),
        ("<img src='data:,'>", "critical image-alt"),
        ("<p>hardly to be read</p>", "serious color-contrast"),
        ("<a href='#x'></a>", "serious link-name"),
    ],
)
def test_axe_sees_planted_faults(browser: Browser, fault: str, named: str) -> None:
    browser.look(1280, 900)
    plant = "document.querySelector('main').insertAdjacentHTML('beforeend', '<div id=planted></div>');"
    browser.evaluate(f'{plant} document.getElementById("planted").innerHTML = {json.dumps(fault)}')
    pale = "item.style.color = '#888'; item.style.background = '#999'"
    browser.evaluate(f"document.querySelectorAll('#planted p').forEach((item) => {{ {pale} }})")
    found = axe.faults(browser)
    browser.evaluate("document.getElementById('planted').remove()")
    assert [item for item in found if item.startswith(named)], found
    assert axe.faults(browser) == []


def test_the_keyboard_reaches_everything(browser: Browser) -> None:
    browser.look(1280, 900)
    browser.evaluate("document.activeElement.blur(); window.scrollTo(0, 0); window.reached = new Set()")
    for _ in range(20):
        browser.press("Tab")
        browser.evaluate("reached.add(document.activeElement.id || document.activeElement.textContent.slice(0, 20))")
        if browser.evaluate("document.activeElement !== document.body"):
            assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    reached = browser.evaluate("[...reached]")
    assert {"Skip to the numbers", "copy", "events", "metrics"} <= set(reached)


def test_the_public_page_shows_the_run_and_no_invite(browser: Browser, swarm: Swarm, page: str) -> None:
    public = (swarm.coordinator_dir / "public-page").read_text().strip()
    browser.open(public)
    browser.wait("document.getElementById('loss')?.textContent.length > 3", timeout_s=20 * PATIENCE)
    browser.wait("document.querySelectorAll('.checkpoint').length > 0", timeout_s=60 * PATIENCE)
    assert browser.evaluate("document.querySelectorAll('#pipeline .peer').length") == 4
    assert browser.evaluate("document.querySelectorAll('#given tr').length") == 4
    assert browser.evaluate("document.querySelectorAll('.checkpoint a').length") == 0
    assert text(browser, "join").endswith("swarmtrain join INVITE")
    assert swarm.invite() not in browser.evaluate("document.documentElement.outerHTML")
    browser.evaluate("document.getElementById('operators').remove()")  # hidden: its links are not for the check
    assert browser.evaluate(FAULTS) == []
    for path in ("api/status", "api/events", "api/history", "api/checkpoints"):
        assert swarm.invite()[:20] not in get(public + path)[1]
    named = {"Host": "run.example.com"}  # the name that its operator's network gives it, or that a hostile page made up
    with urllib.request.urlopen(urllib.request.Request(public, headers=named), timeout=90) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(urllib.request.Request(page, headers=named), timeout=90)
    for path in ("metrics", "api/targets", "checkpoint", "healthz"):
        with pytest.raises(urllib.error.HTTPError):
            get(public + path)
    browser.open(page)
    browser.wait("document.getElementById('loss')?.textContent.length > 3", timeout_s=20 * PATIENCE)
    browser.evaluate("window.isSamePage = true")


def test_a_killed_peer_shows_within_five_seconds_and_why_the_run_waits(browser: Browser, swarm: Swarm) -> None:
    victim = swarm.peers[2]
    victim.kill()
    shown = "document.querySelector('#pipeline .doubt, #pipeline .nobody') !== null"
    assert browser.wait(shown, timeout_s=5 * PATIENCE) < 5 * PATIENCE
    browser.wait("document.getElementById('state-word').textContent === 'waiting'", timeout_s=40 * PATIENCE)
    assert "because stage 2 has no peers" in text(browser, "state-why")
    browser.wait("document.querySelector('#pipeline .nobody') !== null", timeout_s=20 * PATIENCE)
    assert text(browser, "needed") == "stage 2"
    assert "is lost" in text(browser, "events")
    assert browser.evaluate(FAULTS) == []
    if axe.IS_HERE:
        assert axe.faults(browser) == []
    picture(browser, "page-waiting.png")


def test_a_coordinator_that_is_away_is_said_and_found_again(browser: Browser, swarm: Swarm, page: str) -> None:
    swarm.coordinator.kill()
    browser.wait("document.getElementById('state-word').textContent === 'no connection'", timeout_s=20 * PATIENCE)
    swarm.start_coordinator()
    assert (swarm.coordinator_dir / "page").read_text().strip() == page  # the same port
    browser.wait("document.getElementById('state-word').textContent === 'waiting'", timeout_s=30 * PATIENCE)
    assert browser.evaluate("window.isSamePage")
    assert browser.evaluate("document.querySelector('#curve .line').getAttribute('d').length") > 50  # from the journal
    assert browser.evaluate("document.querySelector('#speed .line').getAttribute('d').length") > 50
    assert browser.evaluate("document.querySelectorAll('#curve .dot').length") > 1  # validations
