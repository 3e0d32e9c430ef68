"""Typed, bounded fields of a manifest section: read from plain values, with errors that name the key."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from swarmtrain.errors import ManifestError

T = TypeVar("T")

MAX_TEXT = 4096  # characters of one text value
_LARGEST_INTEGER = 2**64  # TOML allows more; comparing or printing huge ones fails in its own ways


@dataclass(frozen=True)
class Rule:
    """What a key may hold, and one line of help for the printed manifest."""

    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    max_items: int = 0

    def allowed(self, kind: type) -> str:
        """The allowed values in words, for an error message."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        if kind is bool:
            return "true or false"
        if kind is str:
            if self.pattern:
                return f"text that matches {self.pattern}"
            return f"text of at most {MAX_TEXT} characters, none of them a control character"
        noun = {int: "a whole number", float: "a number"}.get(kind, "a list of whole numbers")
        bounds = [f">= {self.low}"] if self.low > -math.inf else []
        bounds += [f"<= {self.high}"] if self.high < math.inf else []
        return " ".join([noun, " and ".join(bounds)]).strip()


def key(help: str, default: Any = MISSING, **limits: Any) -> Any:
    """A dataclass field of a manifest section. Without a default the key is required."""
    return field(default=default, metadata={"rule": Rule(help=help, **limits)})


def rule_of(item: Field[Any]) -> Rule:
    """The rule that `key` attached."""
    rule = item.metadata["rule"]
    assert isinstance(rule, Rule)
    return rule


def read_section(cls: type[T], path: str, raw: object) -> T:
    """Build the section dataclass `cls` from a TOML table. Unknown keys, wrong types and bad values are errors."""
    if not isinstance(raw, dict):
        raise ManifestError(path, f"must be a table, not {type(raw).__name__}")
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name in raw:
        if name not in known:
            raise ManifestError(f"{path}.{one_line(name)}", f"unknown key; {path} has {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, item in known.items():
        if name in raw:
            values[name] = read_value(f"{path}.{name}", raw[name], hints[name], rule_of(item))
        elif item.default is MISSING:
            raise ManifestError(f"{path}.{name}", f"is missing; needs {rule_of(item).allowed(hints[name])}")
    return cls(**values)


def read_value(path: str, value: object, kind: Any, rule: Rule) -> Any:
    """One checked value of type `kind` (bool, int, float, str or tuple[int, ...])."""
    wanted = kind if kind in (bool, int, float, str) else tuple
    problem = ManifestError(path, f"is {_show(value)}; needs {rule.allowed(wanted)}")
    if wanted is tuple:
        if not isinstance(value, list | tuple) or len(value) > rule.max_items:
            raise problem
        return tuple(_checked_number(item, int, rule, problem) for item in value)
    if wanted in (int, float):
        return _checked_number(value, wanted, rule, problem)
    if type(value) is not wanted or (isinstance(value, str) and not _is_plain(value)):
        raise problem
    if rule.choices and value not in rule.choices:
        raise problem
    if rule.pattern and not re.fullmatch(rule.pattern, str(value)):
        raise problem
    return value


def _checked_number(value: object, kind: type, rule: Rule, problem: ManifestError) -> int | float:
    if type(value) is int and abs(value) > _LARGEST_INTEGER:
        raise problem
    if type(value) is int and kind is float:
        value = float(value)
    if type(value) is not kind or not isinstance(value, int | float):
        raise problem
    if not math.isfinite(value) or not rule.low <= value <= rule.high:
        raise problem
    return value if kind is int else value + 0.0  # so that -0.0 and 0.0 have one text


def _is_plain(text: str) -> bool:
    """Whether the text survives being written and read again, in one line."""
    return len(text) <= MAX_TEXT and not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)


def one_line(text: str) -> str:
    """Foreign text for an error message: unprintable characters escaped, long text cut."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:61])
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _show(value: object) -> str:
    if isinstance(value, str):
        return f'"{one_line(value)}"'
    try:
        return one_line(repr(value))
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "far too large"


def toml_value(value: object) -> str:
    """One value as canonical TOML: shortest exact float, double-quoted text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
