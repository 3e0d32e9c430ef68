"""A strict reader of Prometheus's text format: what its own parsers let pass, and a scraper may still trip over."""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
_VALUE = r"(?:[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?)|[+-]Inf|NaN)"
_SAMPLE = re.compile(rf"({_NAME})((?:\{{{_LABEL}(?:,{_LABEL})*\}})?) ({_VALUE})")
_HELP, _TYPE = re.compile(rf"# HELP ({_NAME}) (.+)"), re.compile(rf"# TYPE ({_NAME}) (counter|gauge)")
_BASE_UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|kb|kilobytes|mb|percent)(_total)?$")


def faults(text: str) -> list[str]:
    """What is wrong: order, names, types, units, duplicates."""
    found: list[str] = []
    family, kind, has_help, families, seen = "", "", False, set(), set()
    if not text.endswith("\n"):
        found.append("no newline at the end")
    for line in text.removesuffix("\n").split("\n"):  # other line ends are part of a label
        if match := _HELP.fullmatch(line):
            family, has_help, kind = match[1], True, ""
            if family in families:
                found.append(f"{family} comes twice")
            families.add(family)
        elif match := _TYPE.fullmatch(line):
            if match[1] != family or not has_help or kind:
                found.append(f"TYPE of {match[1]} is not behind its HELP")
            kind = match[2]
            if (kind == "counter") != family.endswith("_total"):
                found.append(f"{kind} {family}")
            if _BASE_UNITS.search(family):
                found.append(f"{family} has no base unit")
        elif match := _SAMPLE.fullmatch(line):
            if match[1] != family or not kind:
                found.append(f"{match[1]} is outside its family")
            if (match[1], match[2]) in seen:
                found.append(f"{match[1]}{match[2]} comes twice")
            seen.add((match[1], match[2]))
            if kind == "counter" and (match[3].startswith("-") or match[3] == "NaN"):
                found.append(f"counter {match[1]} is {match[3]}")
        else:
            found.append(f"not a line of the format: {line!r}")
    return found
