"""docs/protocol.md says what the code does: the same states and arrows, every message, every refusal."""

from __future__ import annotations

import re
from pathlib import Path

import swarmtrain.peer
from swarmtrain.peer.identity import TRANSITIONS, PeerState
from swarmtrain.wire.messages import MESSAGES, Code

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "protocol.md").read_text()


def drawn_arrows() -> set[tuple[str, str]]:
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    return {(one, other) for one, other in re.findall(r"^\s*(\S+) --> ([^\s:]+)", diagram, re.MULTILINE)}


def table(heading: str) -> dict[str, str]:
    """First and last column of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): row[-1] for row in rows}


def test_the_drawn_arrows_are_the_codes() -> None:
    known = {(str(one), str(other)) for one, others in TRANSITIONS.items() for other in others}
    assert drawn_arrows() == known | {("[*]", "joining"), ("gone", "[*]")}


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(PeerState)
    reached = {PeerState.JOINING}
    while new := {other for one in reached for other in TRANSITIONS[one]} - reached:
        reached |= new
    assert reached == set(PeerState)
    assert [state for state in PeerState if not TRANSITIONS[state]] == [PeerState.GONE]


def test_no_code_changes_a_state_past_the_arrows() -> None:
    for path in Path(swarmtrain.peer.__path__[0]).glob("*.py"):
        found = re.findall(r"^.*\bpeer\.state = .*$", path.read_text(), re.MULTILINE)
        assert not found, f"{path.name}: {found}"


def test_every_message_and_its_answer_are_listed() -> None:
    rows = table("Messages")
    kinds = {cls.wire.kind for cls in MESSAGES}
    assert set(rows) == kinds
    for kind, last in rows.items():
        for named in re.findall(r"`(\w+)`", last):
            assert named in kinds, f"{kind}: {named}"


def test_every_refusal_is_listed() -> None:
    assert set(table("Refusals")) == {str(code) for code in Code}
