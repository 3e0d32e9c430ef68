"""What `--help` prints: options in groups, whole words at any width, environment variables, examples.

The texts of options stand with the verbs; groups and examples in `help_texts`.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from swarmtrain.cli.help_texts import EXAMPLES, OPTION_GROUPS, VERB_GROUPS

MAX_WIDTH, MIN_WIDTH = 100, 40
_COLUMN = 26  # where the texts of options begin
_WORDS = {"str": "TEXT", "int": "N", "float": "N", "path": "PATH", "Path": "PATH"}

Row = tuple[str, list[str]]  # what to write, and the paragraphs about it


class Command(TyperCommand):
    """A verb."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        formatter.write("\n".join(_verb(self, ctx, _width())) + "\n")


class Group(TyperGroup):
    """A program or verb with verbs below it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click."""
        formatter.write("\n".join(_group(self, ctx, _width())) + "\n")


class App(typer.Typer):
    """A `Typer` whose verbs print this help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """See `typer.Typer`."""
        return super().command(name, cls=Command, **settings)


def _width() -> int:
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns))


def _verb(command: Any, ctx: Any, width: int) -> Iterator[str]:
    """The lines of a verb's help."""
    name = _verbs(ctx)
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = {item.name: item for item in command.get_params(ctx) if item.param_type_name == "option"}
    usage = [ctx.command_path, "[OPTIONS]", *(_argument_name(item, in_usage=True) for item in arguments)]
    yield from _intro(" ".join(usage), command.help, width)
    yield from _section("Arguments", [(_argument_name(item), _about(item, ctx)) for item in arguments], width)
    for title, names in _groups(name, list(options)):
        rows = [(_option_name(item, ctx), _about(item, ctx)) for key in names if not (item := options[key]).hidden]
        yield from _section(title, rows, width)
    yield from _examples(name, width)


def _group(group: Any, ctx: Any, width: int) -> Iterator[str]:
    """The lines of a group's help."""
    yield from _intro(f"{ctx.command_path} [OPTIONS] COMMAND [ARGS]...", group.help, width)
    name = _verbs(ctx)
    left = dict(group.commands)
    for title, verbs in VERB_GROUPS.items() if not name else ():
        rows = [(verb, [_first_sentence(left.pop(verb))]) for verb in verbs if verb in left]
        yield from _section(title, rows, width, column=15)
    yield from _section("Commands", [(verb, [_first_sentence(left[verb])]) for verb in left], width, column=15)
    options = [item for item in group.get_params(ctx) if not item.hidden]
    yield from _section("Options", [(_option_name(item, ctx), _about(item, ctx)) for item in options], width)
    yield from _examples(name, width)


def _verbs(ctx: Any) -> str:
    """What stands behind the program's name, which is `python -m swarmtrain` where it is not installed."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(reversed(names))


def _intro(usage: str, about: str | None, width: int) -> Iterator[str]:
    yield from _fold(f"Usage: {usage}", width, "  ")
    yield ""
    yield from _fold(" ".join((about or "").split()), width)


def _section(title: str, rows: Sequence[Row], width: int, *, column: int = _COLUMN) -> Iterator[str]:
    """A title and its rows. What is said about a long name begins on a line of its own."""
    if not rows:
        return
    column = min(column, width // 3 if width >= 80 else width // 4)
    yield ""
    yield f"{title}:"
    for name, paragraphs in rows:
        lines = [line for text in paragraphs for line in _fold(text, width - column)]
        head = f"  {name}"
        if len(head) + 2 <= column and lines:
            head = head.ljust(column) + lines.pop(0)
        yield head
        yield from (" " * column + line for line in lines)


def _examples(name: str, width: int) -> Iterator[str]:
    rows = EXAMPLES.get(name, ())
    if rows:
        yield ""
        yield "Examples:"
    for command, about in rows:
        yield from _fold(f"# {about}", width, "  # ", first="  ")
        yield f"  {command}"


def _fold(text: str, width: int, indent: str = "", *, first: str = "") -> list[str]:
    """Folded between words only: names of options and variables are there to be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _groups(verb: str, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The options in their groups; those that are in none come last."""
    left = list(names)
    for title, members in OPTION_GROUPS.get(verb, {}).items():
        yield title, [name for name in members if name in left]
        left = [name for name in left if name not in members]
    yield "Options" if len(left) == len(names) else "Output", left


def _argument_name(argument: Any, *, in_usage: bool = False) -> str:
    name = argument.metavar or argument.name.upper()
    name += "..." if argument.nargs == -1 else ""
    return f"[{name}]" if in_usage and not argument.required else str(name)


def _option_name(option: Any, ctx: Any) -> str:
    names = ", ".join([*sorted(option.opts, key=len), *option.secondary_opts])
    return names if option.is_flag else f"{names} {_metavar(option, ctx)}"


def _metavar(option: Any, ctx: Any) -> str:
    """`N`, `PATH`, `on|off`, or what the verb says."""
    if option.metavar:
        return str(option.metavar)
    shown = str(option.display_type(ctx)).strip("<>")
    shown = shown.removeprefix("list[").removesuffix("]")
    return _WORDS.get(shown, shown)


def _about(parameter: Any, ctx: Any) -> list[str]:
    """What it is, its default, and its variable."""
    about = [" ".join((parameter.help or "").split())]
    notes = []
    if parameter.required:
        notes.append("Required.")
    elif (default := _default(parameter)) and not any("default" in text.lower() for text in about):
        notes.append(f"Default: {default}.")
    if variable := _variable(parameter, ctx):
        notes.append(f"[{variable}]")
    return [*about, *notes] if len(" ".join(notes)) > _COLUMN + 20 else [*about, *([" ".join(notes)] if notes else [])]


def _default(parameter: Any) -> str:
    value = parameter.default
    if isinstance(value, bool):
        return "on" if value else ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value in (None, "", []) or callable(value) else str(value)


def _variable(parameter: Any, ctx: Any) -> str:
    """The environment variable that sets a parameter."""
    if parameter.envvar:
        return str(parameter.envvar)
    is_option = parameter.param_type_name == "option"
    if not is_option or not parameter.allow_from_autoenv or not ctx.auto_envvar_prefix or parameter.name == "help":
        return ""
    return f"{ctx.auto_envvar_prefix}_{parameter.name.upper()}"


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split()).split(". ")[0].rstrip(".") + "."
