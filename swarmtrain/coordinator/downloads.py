"""The checkpoints on the page: which there are, their files with digests, and what the model writes at each.

Only names that a checkpoint's own index lists can be downloaded, so that no request leads out of the directory.
"""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

from swarmtrain.checkpoint import complete
from swarmtrain.checkpoint_index import FILE, read_index
from swarmtrain.errors import SwarmtrainError
from swarmtrain.observe.http import FileBody, Request, Response

log = logging.getLogger(__name__)

MAX_SHOWN = 20
MAX_SAMPLE_BYTES = 4096
SAMPLES = "samples"  # beside `checkpoints`: cli/samples.py writes there
_STEP = re.compile(r"[0-9]{1,12}", re.ASCII)


class Downloads:
    """Reads the directory when it has changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, dict[str, Any]] = {}  # by the checkpoint's name

    def listed(self) -> list[dict[str, Any]]:
        """The newest checkpoints, newest first: step, files with size and SHA-256, sample text, where it is here."""
        there = {path.name: path for path in complete(self._directory)[-MAX_SHOWN:]}
        self._known = {name: self._known.get(name) or self._read(path) for name, path in there.items()}
        found = [{**known, "sample": self._sample(name)} for name, known in self._known.items() if known]
        return sorted(found, key=lambda item: -int(item["step"]))

    def file(self, request: Request) -> Response | FileBody:
        """`?step=N&file=NAME`: one file of a checkpoint; 404 for whatever is not in the list."""
        step, name = request.query.get("step", ""), request.query.get("file", "")
        if _STEP.fullmatch(step) is not None:
            for known in self.listed():
                if known["step"] == int(step) and name in [file["name"] for file in known["files"]]:
                    path = self._directory / f"step-{int(step):08d}" / name
                    return FileBody(path, "application/octet-stream", name)
        return Response(b"404 there is no such file\n", status=HTTPStatus.NOT_FOUND)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            index = read_index(path)
            own = {"name": FILE, "bytes": (path / FILE).stat().st_size, "sha256": ""}
        except (SwarmtrainError, OSError) as error:
            log.info("%s is not shown: %s", path, error)
            return {}
        files = [{"name": stage.file, "bytes": stage.num_bytes, "sha256": stage.sha256} for stage in index.stages]
        return {"step": index.step, "files": [own, *files]}

    def _sample(self, name: str) -> str:
        try:
            with (self._directory.parent / SAMPLES / f"{name}.txt").open("rb") as file:
                return file.read(MAX_SAMPLE_BYTES).decode(errors="replace")
        except OSError:
            return ""
