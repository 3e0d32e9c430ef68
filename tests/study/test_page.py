"""docs/study.md shows what the study wrote: its tables follow from the committed results, figure by figure."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from swarmtrain.study.results import from_lines
from swarmtrain.study.tables import as_csv, as_markdown, rows

DOCS = Path(__file__).parents[2] / "docs"
TABLES = ("wide", "narrow", "precision")


@pytest.mark.parametrize("name", TABLES)
def test_the_page_s_table_follows_from_the_results(name: str) -> None:
    text = (DOCS / "study" / f"{name}.csv").read_text()
    (stage_us,) = {float(line["compute_us_per_token"]) for line in csv.DictReader(text.splitlines())}
    table = rows(from_lines((DOCS / "study" / f"{name}.jsonl").read_text()), stage_us / 1e6)
    assert as_csv(table) == text
    assert f"<!-- {name} -->\n{as_markdown(table)}<!-- end -->\n" in (DOCS / "study.md").read_text()
    assert {row.seeds for row in table} == {3}
