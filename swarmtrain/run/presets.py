"""The manifests that ship with the package, and how a name on the command line becomes a manifest."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from swarmtrain.errors import UsageError
from swarmtrain.run.manifest import Manifest, load_manifest, parse_manifest

PRESETS = ("nano", "micro", "llama-125m", "llama-1b", "llama-8b")


def preset(name: str, overrides: Iterable[str] = ()) -> Manifest:
    """The preset `name`, with overrides."""
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return parse_manifest((resources.files(__package__) / "presets" / f"{name}.toml").read_text("utf-8"), overrides)


def resolve_manifest(text: str, overrides: Iterable[str] = ()) -> Manifest:
    """A preset's name or a manifest file's path, as every verb takes it."""
    if text in PRESETS:
        return preset(text, overrides)
    path = Path(text)
    if not _is_file(path):
        raise UsageError(
            f"{text!r} is neither a preset nor a manifest file",
            fix=f"presets: {', '.join(PRESETS)}; or write a file with `swarmtrain manifest nano > run.toml`",
        )
    return load_manifest(path, overrides)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a directory that may not be read
        return False
