"""What the owner has changed on the peer's own page. It is kept in the state directory, and goes before the options."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from swarmtrain import world
from swarmtrain.courtesy.hours import parse_hours
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.traffic import parse_traffic
from swarmtrain.errors import StorageError, UsageError
from swarmtrain.units import parse_duration, parse_rate

log = logging.getLogger(__name__)

FILE = "owner.json"
MAX_TEXT = 200


@dataclass(frozen=True)
class Settings:
    """As the options of `join` are written; an empty text: no limit. None: as the options say."""

    hours: str | None = None
    only_when_idle: str | None = None
    max_up: str | None = None
    max_down: str | None = None
    max_traffic: str | None = None

    @classmethod
    def checked(cls, found: Mapping[str, Any]) -> Settings:
        """Settings from a page or a file; UsageError names what is wrong with them."""
        known = {item.name for item in fields(cls)}
        for key, value in found.items():
            if key not in known:
                raise UsageError(f"{key[:40]!r} cannot be changed here")
            if value is not None and (not isinstance(value, str) or len(value) > MAX_TEXT):
                raise UsageError(f"{key} is not a short text")
        settings = cls(**found)
        settings.rules(Rules())
        for text in (settings.max_up, settings.max_down):
            if text:
                parse_rate(text)
        return settings

    def rules(self, rules: Rules) -> Rules:
        """The owner's wishes with these changes."""
        if self.hours is not None:
            rules = replace(rules, hours=parse_hours([self.hours]))
        if self.only_when_idle is not None:
            rules = replace(rules, idle_s=parse_duration(self.only_when_idle) if self.only_when_idle else 0.0)
        if self.max_traffic is not None:
            day = rules.traffic.day if rules.traffic is not None else 1
            rules = replace(rules, traffic=parse_traffic(self.max_traffic, day) if self.max_traffic else None)
        return rules

    def rates(self, up_bytes_per_s: float, down_bytes_per_s: float) -> tuple[float, float]:
        """The caps of the line with these changes; 0: none."""
        return _rate(self.max_up, up_bytes_per_s), _rate(self.max_down, down_bytes_per_s)

    def write(self, state_dir: Path) -> None:
        """Keep them for the next start. StorageError if that fails. May block."""
        path = state_dir / FILE
        partial = path.with_suffix(".partial")
        try:
            world.check_disk(path)
            partial.write_text(json.dumps(asdict(self), indent=1))
            world.sync(partial)
            partial.replace(path)
            world.sync(state_dir)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}", fix="free some space") from error


def read_settings(state_dir: Path) -> Settings:
    """Those of the last time. A file that is damaged counts as none, and a warning says so."""
    path = state_dir / FILE
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise UsageError("it is no object")
        return Settings.checked(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, UsageError) as error:
        log.warning("%s is not used: %s", path, error)
    return Settings()


def _rate(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    return parse_rate(text) if text else 0.0
