"""What the owner changes on the page: checked, kept, and above the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmtrain.courtesy.hours import parse_hours
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.settings import FILE, Settings, read_settings
from swarmtrain.courtesy.traffic import TrafficCap
from swarmtrain.errors import StorageError, UsageError


def test_what_is_changed_goes_before_the_options_and_the_rest_stays(tmp_path: Path) -> None:
    Settings(hours="22:00-07:00", max_up="8mbit", max_traffic="").write(tmp_path)
    found = read_settings(tmp_path)
    options = Rules(idle_s=60.0, programs=("game",), traffic=TrafficCap(1000, 5))
    assert found.rules(options) == Rules(hours=parse_hours(["22:00-07:00"]), idle_s=60.0, programs=("game",))
    assert found.rates(5.0, 7.0) == (1e6, 7.0)
    assert Settings(max_up="").rates(5.0, 7.0) == (0.0, 7.0), "an empty text takes a cap away"


def test_another_cap_keeps_the_day_of_the_month() -> None:
    rules = Settings(max_traffic="2GB/month").rules(Rules(traffic=TrafficCap(1000, 5)))
    assert rules.traffic == TrafficCap(2_000_000_000, 5)


@pytest.mark.parametrize(
    "found",
    [
        {"nice": "0"},
        {"hours": 22},
        {"hours": "never"},
        {"max_up": "fast"},
        {"max_down": "0mbit"},
        {"only_when_idle": "-1s"},
        {"max_traffic": "1GB"},
        {"hours": "x" * 1000},
    ],
)
def test_what_an_option_would_refuse_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Settings.checked(found)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hours": "never"}', '{"max_up": 3}', "\0"])
def test_a_damaged_file_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_settings(tmp_path) == Settings()


def test_what_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        Settings(hours="").write(tmp_path / "missing")
