"""`peer.toml`: what a volunteer would otherwise write behind `swarmtrain join`. `swarmtrain init` writes one."""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmtrain.cli.manners import usual_threads
from swarmtrain.errors import StorageError, UsageError

MAX_BYTES = 64 * 1024
OFF = "off"
_NOT_KEYS = ("profile", "help", "test_faults", "as_json", "events")

TEMPLATE = """\
# How this machine takes part: `swarmtrain join` reads it. Every option of `swarmtrain join --help` is a key, with `_`
# for `-`. The command line takes precedence over environment variables, and these over this file.

{name}
threads = {threads}              # the processor's cores less one
max_memory = "{memory_gb}GB"     # three quarters of this machine's
nice = 10                # other programs go first; 0: not
{gpu}

# When you need the machine yourself. The peer says why it pauses, and loses no work.
# hours = ["22:00-07:00"]          # work in these hours only
# only_when_idle = "10min"         # nobody has used the machine for so long
# pause_while = ["game.exe"]       # while one of these programs runs
# yield_gpu = true                 # while another process uses the GPU
# max_gpu_temperature = 80         # degrees Celsius
# max_gpu_power = 250              # watts

# What the line may carry.
# max_up = "20mbit"
# max_down = "100mbit"
# max_traffic = "200GB/month"
# traffic_day = 1                  # of the month, on which it begins
# behind_nat = true                # this machine cannot be dialled
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("init")(init)


def profile_path() -> Path:
    """Where the profile is read: $XDG_CONFIG_HOME/swarmtrain/peer.toml."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "swarmtrain" / "peer.toml"


def init(
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write this file; default: $XDG_CONFIG_HOME/swarmtrain/peer.toml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a profile that `swarmtrain join` reads. On a terminal it asks two things, elsewhere nothing."""
    path = profile or profile_path()
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", fix="edit it, or replace it with --force")
    name, hours = "", ""
    if sys.stdin.isatty() and sys.stdout.isatty():
        name = typer.prompt("What shall this peer be called? (Enter: by its id)", default="", show_default=False)
        hours = typer.prompt("Hours of the day, as 22:00-07:00? (Enter: always)", default="", show_default=False)
    text = profile_text(name=name, hours=hours)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another --profile FILE") from error
    print(f"wrote {path}\nnext: swarmtrain join INVITE")


def profile_text(*, name: str = "", hours: str = "") -> str:
    """A profile for this machine. UsageError for hours that are none."""
    import psutil

    from swarmtrain.courtesy.hours import parse_hours

    spans = parse_hours([hours])
    memory_gb = max(1, int(0.75 * psutil.virtual_memory().total / 1e9))
    text = TEMPLATE.format(
        name=f"name = {_quoted(name)}" if name else '# name = "attic"                 # what the peer is called',
        threads=usual_threads(),
        memory_gb=memory_gb,
        gpu="gpu = 0" if _has_gpu() else "# gpu = 0                          # compute on this CUDA device",
    )
    if spans.spans:
        listed = ", ".join(_quoted(span) for span in str(spans).split(", "))
        text = text.replace('# hours = ["22:00-07:00"]  ', f"hours = [{listed}]  ")
    return text


def read_profile(path: Path, options: set[str]) -> dict[str, Any]:
    """The keys and values of a profile. UsageError names what is wrong: a key that is no option, a value of no use."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than a profile")
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix="`swarmtrain init` writes one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", fix="`swarmtrain init --force` writes a new one") from error
    for key, value in found.items():
        if key not in options:
            near = difflib.get_close_matches(key, options, 1)
            fix = f"did you mean {near[0]}?" if near else "`swarmtrain join --help` names the options"
            raise UsageError(f"{path}: {key[:40]!r} is no option of `swarmtrain join`", fix=fix)
        if not _is_plain(value):
            raise UsageError(
                f"{path}: {key} is a {type(value).__name__}", fix="write a text, a number, or a list of texts"
            )
    return found


def use_profile(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Before the other options are read: what the profile says is their default."""
    if value == OFF or context.resilient_parsing:
        return value
    path = Path(value) if value else profile_path()
    if value or path.exists():
        names = {item.name for item in context.command.params if item.name and item.name not in _NOT_KEYS}
        context.default_map = {**(context.default_map or {}), **read_profile(path, names)}
    return value


ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        is_eager=True,
        callback=use_profile,
        help="Read options from this file; off: from none. Default: $XDG_CONFIG_HOME/swarmtrain/peer.toml.",
    ),
]


def is_from_profile(context: typer.Context, option: str) -> bool:
    """Whether neither the command line nor the environment has set this option."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT_MAP"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, bool | int | float | str)


def _quoted(text: str) -> str:
    plain = "".join(letter for letter in text if letter.isprintable())
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _has_gpu() -> bool:
    from swarmtrain.courtesy.nvml import Nvml, NvmlError

    try:
        Nvml(0)
    except NvmlError:
        return False
    return True
