"""An owner's rules with real processes: a real game, a real signal, and a machine that is gone; no step is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .comparison import References, end_and_compare
from .faults import open_ended
from .harness import PACE, Swarm, ask_daemon, until

pytestmark = pytest.mark.swarm

GAME = f"a-game-of-process-{os.getpid()}"  # other tests of this machine have their own


@contextmanager
def game() -> Iterator[None]:
    """A process of that name, while it lasts."""
    program = [GAME, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(program, executable=sys.executable, stdin=subprocess.PIPE) as process:
        yield
        process.communicate()


def newest(swarm: Swarm) -> int:
    """The step of the newest checkpoint."""
    return max((event["step"] for event in swarm.events("checkpoint_written")), default=0)


def test_the_only_peers_of_two_stages_go_one_in_a_game_and_one_by_a_signal(place: Path, reference: References) -> None:
    """One pauses because a program runs, and is killed in its pause; the other one is drained."""
    with Swarm(open_ended(), place, num_peers=1, min_peers=3, pace=PACE) as swarm:
        leaving = swarm.start_peer(1, "--drain-timeout", "300")  # it waits for a checkpoint
        gamer = swarm.start_peer(2, "--pause-while", GAME, "--nice", "7")
        swarm.wait_step(2)
        assert psutil.Process(gamer.pid).nice() >= 7
        with game():
            until(lambda: ask_daemon(gamer.state_dir, "status")["cause"] == "program", "it pauses")
            status = ask_daemon(gamer.state_dir, "status")
            assert status["state"] == "paused"
            assert GAME in status["reason"]
            until(lambda: ask_daemon(gamer.state_dir, "status")["open_microbatches"] == 0, "it has finished its work")
            until(lambda: newest(swarm) == ask_daemon(gamer.state_dir, "status")["step"], "what it has is on disk")
            gamer.kill()
        swarm.start_peer(2)
        swarm.wait_step(newest(swarm) + 2)
        leaving.process.send_signal(signal.SIGTERM)
        until(lambda: not leaving.is_running, "it has left")
        swarm.start_peer(1)
        swarm.wait_step(newest(swarm) + 1)
        assert not swarm.events("run_rolled_back")
        end_and_compare(swarm, reference)
