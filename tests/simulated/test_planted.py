"""The list of defects to plant is true to the source, and seeds find what is planted (scripts/planted: all of them)."""

from __future__ import annotations

import pytest

from .planted import DEFECTS, ROOT, Defect, find


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_what_a_defect_replaces_is_there_once(defect: Defect) -> None:
    text = (ROOT / "swarmtrain" / defect.file).read_text()
    assert text.count(defect.old) == 1
    assert defect.new != defect.old


def test_there_are_twenty_defects_of_different_names() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) == 20


@pytest.mark.long
def test_planted_defects_are_found() -> None:
    for defect in DEFECTS[:3]:
        seed, said = find(defect, first=0, num_seeds=200)
        assert seed is not None, f"{defect.name}: {said}"
