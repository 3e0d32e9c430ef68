"""The list of defects to plant is true to the source and to the docs, and the known seeds find what is planted."""

from __future__ import annotations

import pytest

from .planted import DEFECTS, FOUND, PAGE, ROOT, Defect, find, table_row


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_what_a_defect_replaces_is_there_once(defect: Defect) -> None:
    for change in defect.changes:
        assert (ROOT / "swarmtrain" / change.file).read_text().count(change.old) == 1
        assert change.new != change.old


def test_there_are_twenty_defects_of_different_names() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) == 20


def test_the_page_says_what_finds_them() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    wanted = [table_row(defect, FOUND[defect.name]) for defect in DEFECTS if defect.name in FOUND]
    assert [row for row in wanted if row not in rows] == []


@pytest.mark.long
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_known_seed_finds_a_planted_defect(defect: Defect) -> None:
    known = FOUND.get(defect.name)
    if known is None or known.seed is None:
        pytest.skip("no seed is known")
    found = find(defect, first=known.seed, num_seeds=1)
    assert found.seed == known.seed, f"scripts/planted {defect.name} --seeds 2000: {found.said}"
