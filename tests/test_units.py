"""Sizes, rates and durations as people write them; everything else is a usage error that says how to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.errors import UsageError
from swarmtrain.units import (
    MAX_BYTES,
    MAX_DURATION_S,
    MAX_RATE,
    check_between,
    parse_duration,
    parse_number,
    parse_rate,
    parse_size,
    show_count,
    show_gb,
    show_rate,
    show_size,
)

NONSENSE = ("", " ", "some", "nan", "inf", "-inf", "infGB", "nanGB", "-3GB", "-5s", "+inf", "0x10", "1e", "5 parsecs")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GB", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("64 KiB", 64 << 10),
        ("1.5kB", 1500),
        (".5MiB", 1 << 19),
        ("4096", 4096),
        ("1e9", 10**9),
        ("0", 0),
        ("0GB", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", [*NONSENSE, "8G", "8mbit", "1e99GB", "9" * 400, "1e18GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a size|more than any machine") as found:
        parse_size(text)
    assert "8GB" in found.value.fix


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20mbit", 2.5e6), ("2.5 MB/s", 2.5e6), ("512KiB", 524288.0), ("1gbit/s", 125e6), ("800kbps", 8e5), ("80b", 80.0)],
)
def test_rates_are_read_as_people_write_them(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", [*NONSENSE, "fast", "0mbit", "-5mbit", "5", "1e5mb", "9000000gbit", "9" * 400 + "bit", "infmbit"]
)
def test_what_is_no_rate_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("15s", 15.0), ("15", 15.0), ("0.5s", 0.5), ("500ms", 0.5), ("2min", 120.0), ("1h", 3600.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [*NONSENSE, "0", "0s", "1e30s", "9000h", "5m"])
def test_what_is_no_duration_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@given(st.text(max_size=12) | st.from_regex(r"\A[-+]?[0-9.e]{1,6} ?[a-zA-Z]{0,5}\Z"))
def test_whatever_is_written_becomes_a_sensible_number_or_a_usage_error(text: str) -> None:
    for parse, high in ((parse_size, MAX_BYTES), (parse_rate, MAX_RATE), (parse_duration, MAX_DURATION_S)):
        try:
            value = parse(text)
        except UsageError:
            continue
        assert 0.0 <= value <= high


@given(st.floats() | st.integers(-(10**400), 10**400))
def test_bounds_keep_out_everything_else(value: float) -> None:
    if 1 <= value <= 8:
        check_between("--threads", value, 1, 8)
    else:
        with pytest.raises(UsageError, match=r"--threads is .*; it must be from 1 to 8"):
            check_between("--threads", value, 1, 8)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (412e6, "412 MB"),
        (1.5e9, "1.5 GB"),
        (999_700_000, "1 GB"),
        (7e15, "7 PB"),
        (12_345e15, "12,345 PB"),
    ],
)
def test_sizes_are_shown_with_three_digits_and_a_unit(num_bytes: float, text: str) -> None:
    assert show_size(num_bytes) == text


def test_counts_rates_and_memory_are_shown_as_people_write_them() -> None:
    assert [show_count(count) for count in (17, 2048, 125e6, 8.03e9)] == ["17", "2.05k", "125M", "8.03G"]
    assert [show_rate(rate) for rate in (3750.0, 2.5e6, 1.25e10)] == ["30 kbit/s", "20 Mbit/s", "100 Gbit/s"]
    assert (show_gb(3.21e9), show_gb(1e6)) == ("3.2 GB", "0.0 GB")


@given(st.floats(1.0, 999e12))
def test_what_is_shown_can_be_parsed_again_to_three_digits(value: float) -> None:
    assert parse_size(show_size(value)) == pytest.approx(value, rel=0.006, abs=1.0)
    if value <= MAX_RATE:
        assert parse_rate(show_rate(value)) == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "1e999", "seven"])
def test_a_number_of_a_setting_is_finite(text: str) -> None:
    assert parse_number(" -2.5e3 ", "download_s") == -2500.0
    with pytest.raises(UsageError, match=r"download_s: .* is not a number"):
        parse_number(text, "download_s")
