"""Every `swarmtrain` command on the README and the pages of docs/ names a verb and options that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from swarmtrain.cli.main import app

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "docker" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ROOT: Any = get_command(app)
COMMAND = re.compile(r"(?<![\w./-])(?:swarmtrain|scripts/demo|scripts/sim)(?= [a-z-])[^`\n]*")
SCRIPTS = {"scripts/demo": "local", "scripts/sim": "sim"}  # and the verb that they run
END = re.compile(r"\s#|\s--\s|[>&;]|\s\|\s|\)")


def commands(text: str) -> list[str]:
    """What stands in code: lines that are indented, and pieces between backticks."""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    pieces = re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    found = [match for part in (*lines, *pieces) for match in COMMAND.findall(" ".join(part.split()))]
    return [END.split(item)[0].strip() for item in found]


def unknown(command: str) -> list[str]:
    """Words of a command that the program does not know: its verb (`a|b` are several), its options."""
    words = command.replace("[", " ").replace("]", " ").split()
    if words[0] in SCRIPTS:
        words = ["swarmtrain", SCRIPTS[words[0]], *words[1:]]
    wrong: list[str] = []
    for verb in words[1].split("|"):
        if verb not in ROOT.commands and not verb.startswith("--"):
            wrong.append(verb)
            continue
        target, rest = (ROOT, words[1:]) if verb.startswith("--") else (ROOT.commands[verb], words[2:])
        if hasattr(target, "commands") and rest and rest[0] in target.commands:
            target = target.commands[rest[0]]
        known = {name for option in target.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
        used = {name for word in rest for name in re.findall(r"^--[a-z-]+", word)}
        wrong += sorted(used - known)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_documented_commands_exist(page: Path) -> None:
    assert [(command, unknown(command)) for command in commands(page.read_text()) if unknown(command)] == []


def test_commands_are_found_and_wrong_ones_seen() -> None:
    found = {item for page in PAGES for item in commands(page.read_text())}
    assert len(found) > 40
    assert any(item.startswith("scripts/demo --kill-every") for item in found)
    text = (
        "see `swarmtrain docter`\n\n    swarmtrain join X --stage 3 --gpus 0  # or --cpu\n    scripts/demo --kill 3\n"
        "    scripts/sim --stages 3 --peer 5\n"
    )
    assert [unknown(item) for item in commands(text)] == [["--gpus"], ["--kill"], ["--peer"], ["docter"]]
    assert [unknown(item) for item in commands("`swarmtrain eval|generate|export X --seed 3`")] == [
        ["--seed", "--seed"]
    ]
    assert commands("    swarmtrain manifest nano > run.toml") == ["swarmtrain manifest nano"]
