"""Terminals of daemons: lines for events, and what is drawn below them; at any width, whatever other machines say."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from swarmtrain.cli.live import LiveView
from swarmtrain.cli.live_text import peer_frame, peer_line, run_frame, run_line
from swarmtrain.cli.status_text import status_lines
from swarmtrain.observe import events as module
from swarmtrain.observe.activity import Cause
from swarmtrain.observe.events import (
    ActivityChanged,
    Event,
    PeerEnded,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PhaseReached,
    RunWaits,
    StagePrepared,
    StepApplied,
    StepTimed,
    called,
    event_from,
)
from swarmtrain.run.invite import Invite
from swarmtrain.run.presets import preset
from swarmtrain.terminal import folded

RUN = preset("nano", ["schedule.steps=30", "stages.count=2"])
EVIL = "\x1b[2J\x07evil\n‮"
LATELY = {"compute": 0.7, "idle": 0.2, "wire": 0.1, "queue": 0.0, "reduce": 0.0}


def member(name: str, stage: int) -> dict[str, Any]:
    return {
        "peer": f"12D3KooW{name:x>8}", "name": name, "stage": stage, "state": "serving", "step": 4, "silent_s": 1.0,
        "doubt": "", "microbatches": 12, "forward_ms": 3.0, "backward_ms": 6.0, "lately": LATELY,
    }  # fmt: skip


def coordinator(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "coordinator", "name": "nano", "run": "0123456789abcdef", "state": "training", "cause": "training",
        "reason": "", "since": 1.0, "next": "step 5 of 30", "step": 4, "steps": 30, "val_loss": None, "now": 100.0,
        "last": {"loss": 2.25, "tokens_per_s": 1234.0}, "seconds_left": 3600.0, "last_applied_at": 99.0,
        "stages": [[member("attic", 0)], [member("cellar", 1)]], "page": "http://127.0.0.1:1/", "invite": "st2-x",
        "excluded": [], "num_excluded": 0, "pending": [],
        **changes,
    }  # fmt: skip


def peer(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "peer", "peer": "12D3KooWabcdefgh", "name": "attic", "run": "0123456789abcdef", "run_name": "nano",
        "stage": 1, "state": "serving", "cause": "working", "reason": "", "since": 1.0, "next": "the next microbatch",
        "step": 4, "steps": 30, "run_loss": 2.25, "run_tokens_per_s": 1234.0, "seconds_left": 3600.0, "silent_s": 1.0,
        "credit": {"microbatches": 96, "tokens": 98304, "share": 0.4125, "seconds": 0.0},
        "now": 7300.0, "started_at": 100.0,
        "traffic": {"sent": {"total_bytes": 8.2e6}, "received": {"total_bytes": 8.1e6}}, "lately": LATELY,
        "memory_bytes": 412e6, "courtesy": {"month": None}, **changes,
    }  # fmt: skip


def drawn(frame: Group, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    return ["".join(part.text for part in line) for line in console.render_lines(frame, pad=False)]


def test_a_step_is_one_readable_line() -> None:
    event = StepApplied(22, 2.46201234, 90112, 7371.4, 1.0, 0.01, at=1.0)
    assert run_line(event, RUN, 41.0) == "step 22/30  loss 2.4620  7,371 tokens/s  41 s left"
    last = StepApplied(30, 2.4, 122880, 7371.4, 1.0, 0.01, 2.5, at=1.0)
    assert run_line(last, RUN, 41.0) == "step 30/30  loss 2.4000  7,371 tokens/s  validation 2.5000"


def test_what_every_step_brings_is_quiet_and_what_matters_is_not() -> None:
    quiet = (StagePrepared(3, 0, 7, 0.010999999999967258), StepTimed(3, 0.5, 0.01, 0.02))
    assert all(run_line(event, RUN, None) == "" for event in quiet)
    assert quiet[0].line() == "step 3: stage 0 holds its sum after 0.011 s (attempt 7)"
    loud = (RunWaits("stage 1 has no peers"), PeerLost("peer-abcdefgh", 1, "no heartbeat", "attic"))
    assert [run_line(event, RUN, None) for event in loud] == [
        "the run waits: stage 1 has no peers",
        "attic (abcdefgh) of stage 1 is lost: no heartbeat",
    ]


def test_the_end_of_a_good_run_does_not_read_like_a_failure() -> None:
    left = PeerLeft("peer-abcdefgh", 1, 120, "attic")
    assert run_line(left, RUN, None) == "attic (abcdefgh) has left stage 1 after 120 microbatches"
    thanks = PeerEnded(120, 120, 0, 0, 0, 120, 122880, 0.5, 4000.0, 8_200_000, 8_100_000, "attic").line()
    assert thanks == (
        "Thank you, attic! You computed 120 microbatches (122,880 tokens), 50 % of the run's work, in 67 min, "
        "with 8.2 MB sent and 8.1 MB received."
    )
    assert "Thank you" in PeerEnded(0, 0, 0, 0, 0).line()


def test_a_name_is_used_wherever_a_peer_is_named() -> None:
    assert called("peer-abcdefgh", "attic") == "attic (abcdefgh)"
    assert called("peer-abcdefgh") == "peer abcdefgh"
    named = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, Event)]
    for cls in named:
        if "peer" in cls.__dataclass_fields__ and cls.__name__ != "DonorDropped":  # a newcomer knows donors by id only
            assert "peer_name" in cls.__dataclass_fields__, cls
    texts = [*status_lines(coordinator()), *status_lines(peer()), *drawn(run_frame(coordinator(), 80, 40), 80)]
    assert sum("attic" in text for text in texts) >= 3


def test_the_start_of_a_coordinator_says_what_to_hand_out() -> None:
    invite = Invite("0123456789abcdef", bytes(32), ("/ip4/127.0.0.1/tcp/1/p2p/x",)).text()
    said = run_line(PhaseReached("invite", invite), RUN, None).splitlines()
    assert said == [
        "run 0123456789abcdef of nano: 30 steps, 2 stages",
        f"join with: swarmtrain join {invite}",
    ]


def test_the_start_of_a_volunteer_is_in_words() -> None:
    network = PhaseReached("network", "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW, /ip4/127.0.0.1/tcp/4001/p2p/12D3KooW")
    assert peer_line(network, "") == "listening at 192.0.2.7:4001, 127.0.0.1:4001"
    assert peer_line(PhaseReached("identity", "12D3KooWabcdefgh"), "attic") == "you are attic (abcdefgh)"
    assert peer_line(ActivityChanged(Cause.NO_LEASE, "no work has come", "", 1.0), "") == ""
    away = ActivityChanged(Cause.COORDINATOR_AWAY, "the coordinator does not answer", "", 1.0)
    assert peer_line(away, "") == "idle: the coordinator does not answer"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_frames_fit_and_say_it_all_at_80_columns(width: int) -> None:
    pictures = [drawn(run_frame(coordinator(), width, 40), width), drawn(peer_frame(peer(), width, 40), width)]
    assert all(cell_len(line) <= width for lines in pictures for line in lines)
    if width >= 80:
        whole = "\n".join(line for lines in pictures for line in lines)
        assert "…" not in whole
        for said in ("step 4/30", "loss 2.2500", "1,234 tokens/s", "60 min left", "96 microbatches", "98.3k tokens",
                     "41.2 % of the run's work", "2.0 h, 8.2 MB up, 8.1 MB down", "70 % compute"):  # fmt: skip
            assert said in whole, said


def test_a_crowd_leaves_room_for_what_happens() -> None:
    crowd = coordinator(stages=[[member(f"p{i}", 0) for i in range(60)], []])
    for height in (5, 10, 24, 60):
        assert len(drawn(run_frame(crowd, 80, height), 80)) <= max(3, height - 6)


def test_old_figures_are_marked() -> None:
    silent = drawn(peer_frame(peer(silent_s=40.0), 80, 24), 80)
    assert any("step 4/30, as of 40 s ago  loss 2.2500" in line for line in silent)
    assert not any("tokens/s" in line or " left" in line or "…" in line for line in silent)
    assert not any("as of" in line for line in drawn(peer_frame(peer(), 80, 24), 80))
    waits = coordinator(state="waiting", cause="waiting", reason="stage 1 has no peers", seconds_left=None,
                        last_applied_at=40.0)  # fmt: skip
    shown = "\n".join(drawn(run_frame(waits, 80, 24), 80))
    assert "step 4/30, 60 s ago" in shown
    assert "tokens/s" not in shown
    assert "tokens/s" not in "\n".join(status_lines(waits))


def test_status_fits_80_columns_but_for_the_invite() -> None:
    crowd = coordinator(stages=[[member(f"volunteer{i}", 0) for i in range(12)], []])
    for line in [*status_lines(crowd), *status_lines(peer(cause="no_lease", reason="no work has come: " + "x " * 40))]:
        assert all(cell_len(part) <= 80 for part in folded(line, 80, indent="    ").splitlines())
    (invite,) = [line for line in status_lines(coordinator(invite="st1-" + "x" * 200)) if "join with" in line]
    assert folded(invite, 80, indent="    ") == invite  # it is there to be copied


def test_names_and_reasons_cannot_move_the_cursor() -> None:
    evil = coordinator(stages=[[member(EVIL, 0)]], reason=EVIL, name=EVIL, next=EVIL)
    for frame in (run_frame(evil, 200, 40), peer_frame(peer(reason=EVIL, run_name=EVIL), 200, 40)):
        assert all(line.isprintable() for line in drawn(frame, 200))
    out = io.StringIO()
    view = LiveView(out, lambda event: event.line(), run_frame)
    view.event(PeerJoined("peer-abcdefgh", 1, 3, EVIL))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()


def test_events_survive_json_and_nothing_else_is_taken_for_one() -> None:
    event = PeerLeft("peer-abcdefgh", 1, 120, "attic", at=1.0)
    assert event_from(event.as_dict()) == event
    for wrong in (None, [], {}, {"event": "unheard_of"}, {"event": "peer_left", "at": 1.0}):
        with pytest.raises(ValueError, match=r"event|another"):
            event_from(wrong)
