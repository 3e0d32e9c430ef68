"""Sizes, rates, durations and counts as people write them: parsed, checked and printed here and nowhere else.

Parsing raises `UsageError`, with a fix that shows the notation, for text that is not such a number and for values that
no machine has (negative, infinite, NaN, beyond the bounds below).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from swarmtrain.errors import UsageError

MIB = 1 << 20
MBIT = 1e6 / 8  # bytes
MAX_BYTES = 1 << 60  # no machine has more
MAX_RATE = 1e12  # bytes per second; a cap is announced in a message, which bounds it
MAX_DURATION_S = 366 * 86400.0

_AMOUNT = re.compile(
    r"(?P<number>(\d{1,30}\.?\d{0,30}|\.\d{1,30})(e\+?\d{1,2})?)\s*(?P<unit>[a-z]*)", re.IGNORECASE | re.ASCII
)
_RATE = re.compile(r"(?P<number>\d{1,30}(\.\d{1,30})?)\s*(?P<unit>[a-z]+?)(ps|/s)?", re.IGNORECASE | re.ASCII)

_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}
_BINARY_SIZES = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}
_PREFIXES = ("", "k", "M", "G", "T", "P")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes of `8GB`, `500MB`, `2GiB`, or plain bytes; 0 is allowed."""
    fix = "write it as 8GB, 500MB or 2GiB"
    num_bytes = _amount(text, _AMOUNT, {**_SIZES, **_BINARY_SIZES}, "a size", fix)
    if num_bytes > MAX_BYTES:
        raise UsageError(f"{text[:40]!r} is more than any machine has", fix=fix)
    return int(num_bytes)


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as "20mbit", "2.5 MB/s" or "512KiB"; above 0."""
    fix = "write it as 20mbit, 2.5MB/s or 512KiB/s"
    units = {name: factor for name, factor in {**_BITS, **_SIZES, **_BINARY_SIZES}.items() if name}
    rate = _amount(text, _RATE, units, "a rate", fix)
    if rate <= 0.0:
        raise UsageError(f"{text[:40]!r} is not a rate", fix=fix)
    if rate > MAX_RATE:
        raise UsageError(
            f"{text[:40]!r} is more than any line carries", fix="leave the option out: then there is no cap"
        )
    return rate


def parse_duration(text: str) -> float:
    """Seconds of `15s`, `500ms`, `2min`, `1h`, or plain seconds; above 0."""
    fix = "write it as 15s, 2min, 1h or 7d"
    seconds = _amount(text, _AMOUNT, _SECONDS, "a time", fix)
    if not 0.0 < seconds <= MAX_DURATION_S:
        raise UsageError(f"{text[:40]!r} is not a time above zero and below a year", fix=fix)
    return seconds


def show_count(count: float) -> str:
    """`125M`, `2.05k`, `17`: three digits and a decimal prefix, without a space before a unit such as tokens/s."""
    return "".join(_scaled(count))


def show_size(num_bytes: float) -> str:
    """`412 MB`, `1.5 GB`: three digits, decimal prefixes."""
    number, prefix = _scaled(num_bytes)
    return f"{number} {prefix}B"


def show_rate(bytes_per_s: float) -> str:
    """`20 Mbit/s`: lines are sold and capped in bits."""
    number, prefix = _scaled(8.0 * bytes_per_s)
    return f"{number} {prefix}bit/s"


def show_gb(num_bytes: float) -> str:
    """`3.2 GB`: always in gigabytes, for two sizes of one machine that are read beside each other."""
    return f"{num_bytes / 1e9:.1f} GB"


def show_duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.2 h`, `9.5 d`."""
    for unit, length, limit in (("s", 1.0, 99.5), ("min", 60.0, 99.5 * 60), ("h", 3600.0, 71.5 * 3600)):
        if seconds < limit:
            return f"{seconds / length:.1f} h" if unit == "h" else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.1f} d"


def _scaled(number: float) -> tuple[str, str]:
    """Three digits and the prefix; 999.6 is 1k already."""
    for prefix in _PREFIXES[:-1]:
        if abs(number) < 999.5:
            return f"{number:.3g}", prefix
        number /= 1000.0
    return f"{number:,.3g}" if number < 999.5 else f"{number:,.0f}", _PREFIXES[-1]


def parse_number(text: str, what: str) -> float:
    """A finite number; `what` names it in the `UsageError`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{what[:80]}: {text[:40]!r} is not a number")
    return number


def check_between(what: str, value: float, low: float, high: float) -> None:
    """`UsageError` unless `value` lies from `low` to `high`; NaN never does."""
    if not low <= value <= high:
        raise UsageError(f"{what} is {str(value)[:40]}; it must be from {low} to {high}")


def _amount(text: str, form: re.Pattern[str], units: Mapping[str, float], noun: str, fix: str) -> float:
    match = form.fullmatch(text.strip())
    factor = units.get(match["unit"].lower()) if match is not None else None
    if match is None or factor is None:
        raise UsageError(f"{text[:40]!r} is not {noun}", fix=fix)
    return float(match["number"]) * factor
