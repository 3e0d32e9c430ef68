"""The recorded screens on docs/terminals.md are those of this program: all are there, and look as they would now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "terminals.md").read_text()
CLOCK = r"\d\d:\d\d:\d\d  "
# What stands in each block; the program's own tests hold it to the same texts.
LOOKS = {
    "coordinator": (
        rf"{CLOCK}run \w{{16}} of nano: \d+ steps, 2 stages",
        rf"{CLOCK}step \d+/\d+  loss \d\.\d{{4}}  [\d,]+ tokens/s",
        r"STAGE  PEER +STATE +STEP +DONE +FWD\+BWD +SEEN +COMPUTE +IDLE",
    ),
    "coordinator-end": (
        rf"{CLOCK}all steps are done; validation loss",
        rf"{CLOCK}attic \(\w{{8}}\) has left stage \d after \d+",
    ),
    "volunteer": (
        rf"{CLOCK}you are attic \(\w{{8}}\)",
        r"you   [\d,]+ microbatches, \S+ tokens, \S+ % of the run's work",
        r"run   ━+╌+ step \d+/\d+  loss",
    ),
    "end": (r"Thank you, attic! You computed \d+ microbatches",),
    "status": (
        r"attic \(\w{8}\) of nano, run \w{16}: stage \d, ",
        r"  given: \d+ microbatches",
        r"  join with: swarmtrain join st1-",
    ),
    "top": (r"nano  run \w{16}", r"busiest links  "),
}


@pytest.mark.parametrize("name", list(LOOKS))
def test_the_recorded_screen_is_there_and_fits(name: str) -> None:
    (block,) = re.findall(rf"<!-- recorded: {name} -->\n\n((?:    .*\n|\n)+)", PAGE)
    lines = [line[4:] for line in block.splitlines()]
    for pattern in LOOKS[name]:
        assert any(re.match(pattern, line) for line in lines), pattern
    paths = [line for line in lines if "/checkpoints/" in line]  # stay whole
    assert all(len(line) <= 80 for line in lines if line not in paths)


def test_every_marker_has_a_screen() -> None:
    assert sorted(re.findall(r"<!-- recorded: (\S+) -->", PAGE)) == sorted(LOOKS)
