"""The docs are true about the tree: the map of rooms, the list of import floors, and every file and test they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_imports import FLOORS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swarmtrain"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md", *DOCS]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
HISTORIC = re.compile(r"\[[a-z_…]+\]")  # parameters of a test, behind its name
FILE = re.compile(r"^[\w.*-]+(?:/[\w.*-]+)*\.(?:py|c)$")


def in_backticks(text: str) -> list[str]:
    """What stands between single backticks, without the blocks that are indented or fenced."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def section(heading: str) -> str:
    return ARCHITECTURE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def code_lines(text: str) -> list[str]:
    return [line[4:] for line in text.splitlines() if line.startswith("    ")]


def rooms_in_the_tree() -> set[str]:
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    return rooms | {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}


def python_files() -> set[str]:
    """Paths from the root of all sources that a page may name."""
    folders = ("swarmtrain", "tests", "scripts", "docker")
    found = [path for folder in folders for pattern in ("*.py", "*.c") for path in (ROOT / folder).rglob(pattern)]
    return {str(path.relative_to(ROOT)) for path in found}


def missing_files(names: set[str], files: set[str]) -> set[str]:
    """Names with a room must be a path from the root, the package or tests/; a bare name may lie in any room."""
    bare = {name.rsplit("/", 1)[-1] for name in files}
    places = ("", "swarmtrain/", "tests/", "tests/simulated/")
    known = {name for name in names if any(place + name in files for place in places)}
    return {name for name in names - known if "/" in name or name not in bare}


def test_the_map_names_every_room_and_nothing_else() -> None:
    head, *rows = code_lines(section("The map"))
    assert head == "swarmtrain/"
    named = [row.split()[0] for row in rows if row.strip()]
    assert sorted(named) == sorted(rooms_in_the_tree())
    assert all(len(row.split()) > 3 for row in rows if row.strip()), "each room has a few words of its own"


def test_the_page_shows_the_floors_that_the_imports_keep() -> None:
    shown = [set(line.split()) for line in code_lines(section("Imports point downwards"))]
    kept = [{room for room in floor if not room.startswith("__")} for floor in FLOORS]
    assert shown == [floor for floor in kept if floor]


def test_every_module_of_a_peer_is_in_the_table() -> None:
    rows = [line for line in section("A peer's life").splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])]
    assert sorted(named) == sorted(path.name for path in (PACKAGE / "peer").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    text, files = page.read_text(), python_files()
    words = [HISTORIC.sub("", word) for item in in_backticks(text) for word in re.split(r"[ :,]+", item)]
    assert missing_files({word for word in words if FILE.match(word) and "*" not in word}, files) == set()
    functions = {
        name
        for path in files
        if path.startswith("tests/")
        for name in re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
    }
    modules = {Path(path).stem for path in files}
    named = {word for word in words if re.fullmatch(r"test_\w+", word)}
    assert named - functions - modules == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        aimed = (page.parent / path).resolve() if path else page
        assert aimed.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", aimed.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_a_page_begins_with_whom_it_is_for(page: Path) -> None:
    title, empty, first, *_ = page.read_text().splitlines()
    assert title.startswith("# ")
    assert empty == ""
    assert first.startswith("For ")


def test_wrong_names_are_seen() -> None:
    files = python_files()
    assert missing_files({"peer/ledger.py", "ledger.py", "tests/rpc/test_link.py", "peer/nothing.py"}, files) == {
        "peer/nothing.py"
    }
    assert missing_files({"wire/ledger.py", "nothing.py"}, files) == {"wire/ledger.py", "nothing.py"}
    assert in_backticks("see `a.py`\n\n    and `b.py`\n") == ["a.py"]
