"""What a peer has given over time: a few hundred points, in a file, so that a restart does not begin a new curve."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from swarmtrain import world

log = logging.getLogger(__name__)

FILE = "contribution.json"
MAX_POINTS = 300  # when they are more, every second one is dropped
LEAST_S = 60.0  # between two points
WRITE_S = 600.0


class Contribution:
    """Times, and the microbatches that count as the peer's by then."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self.points: list[tuple[float, int]] = _read(self._path)
        self._every_s = LEAST_S
        self._written_at = float("-inf")

    def note(self, at: float, microbatches: int) -> None:
        """What counts now; the last point is the newest one."""
        points = self.points
        if len(points) > 1 and at - points[-2][0] < self._every_s:
            points.pop()
        points.append((at, microbatches))
        if len(points) > MAX_POINTS:
            self.points = points[::2]
            self._every_s = 2 * self._every_s

    @property
    def needs_writing(self) -> bool:
        """Whether the file is old."""
        return bool(self.points) and self.points[-1][0] - self._written_at >= WRITE_S

    def write(self) -> None:
        """Replace the file. A full disk leaves the old one. May block."""
        if not self.points:
            return
        self._written_at = self.points[-1][0]
        partial = self._path.with_suffix(".partial")
        try:
            world.check_disk(self._path)
            partial.write_text(json.dumps(self.points))
            partial.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror or error)


def _read(path: Path) -> list[tuple[float, int]]:
    """The points of former lives; of a damaged file none."""
    try:
        return [(float(at), int(count)) for at, count in json.loads(path.read_text())][-MAX_POINTS:]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is not used: %s", path, error)
        return []
