"""docs/model.md names its proofs; they exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_test_that_the_page_names_exists() -> None:
    page = (HERE.parent.parent / "docs" / "model.md").read_text(encoding="utf-8")
    sources = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(sources.values()), re.MULTILINE))
    named = set(re.findall(r"\b(test_\w+(?:\.py)?)", page))
    assert len(named) > 20
    assert {name for name in named if name not in functions and name not in sources} == set()
    variants = re.findall(r"\[([a-z_]{5,})\]", page)
    assert variants
    broken = sources["test_rules.py"] + sources["test_optimizer.py"]
    assert [variant for variant in variants if f"def {variant}(" not in broken] == []
