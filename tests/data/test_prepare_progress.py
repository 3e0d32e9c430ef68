from __future__ import annotations

import io

from swarmtrain.data.prepare import PrepareProgress
from swarmtrain.data.progress import ProgressBar, render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(read_bytes: int, tokens: int = 0, phase: str = "tokenizing") -> PrepareProgress:
    return PrepareProgress(phase, read_bytes, 1000, tokens)


def test_the_line_shows_share_rate_and_estimate() -> None:
    line = render(at(500, 2000), at(0), elapsed_s=10)
    assert line.startswith("tokenizing [############............]  50%")
    assert "0:10 left" in line
    assert "50B/s" in line
    assert "2k tokens  200 tokens/s" in line


def test_a_resumed_run_does_not_count_what_an_earlier_one_did() -> None:
    assert "0:40 left" in render(at(600), at(500), elapsed_s=10)


def test_the_line_is_sane_at_the_edges() -> None:
    assert "? left" in render(at(0), at(0), elapsed_s=0)
    assert " 100%" in render(PrepareProgress("tokenizing", 5, 0, 5), at(0), elapsed_s=1)
    assert "27:46:39 left" in render(PrepareProgress("tokenizing", 1, 100_000, 5), at(0), elapsed_s=1)


def test_nothing_is_drawn_where_nobody_watches() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for number in range(10):
        bar(at(number))
    bar.close()
    assert stream.getvalue() == ""


def test_a_terminal_is_redrawn_ten_times_a_second_and_left_clean() -> None:
    stream, now = Terminal(), [0.0]
    bar = ProgressBar(stream, clock=lambda: now[0])
    for number in range(100):
        bar(at(number * 10))
        now[0] += 0.01
    bar.close()
    lines = stream.getvalue().split("\r\x1b[K")
    assert 8 <= len([line for line in lines if line]) <= 11
    assert lines[-1] == ""


def test_rates_begin_anew_with_each_phase() -> None:
    stream, now = Terminal(), [0.0]
    bar = ProgressBar(stream, clock=lambda: now[0])
    for phase, read_bytes in (("training", 0), ("training", 1000), ("tokenizing", 100), ("tokenizing", 200)):
        bar(at(read_bytes, phase=phase))
        now[0] += 10
    assert "0:80" not in stream.getvalue()
    assert "tokenizing" in stream.getvalue()
    assert "1:20 left" in stream.getvalue()  # 100 bytes in 10 s, 800 to go
