"""What the model writes at each checkpoint: `swarmtrain generate` as a process of the lowest priority, one at a time.

It runs on the coordinator's machine, needs the memory of the whole model for seconds to minutes, and is off unless
`--samples` is given. A checkpoint that comes while a sample is being made has none.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path

from swarmtrain.data.files import atomic_write
from swarmtrain.errors import StorageError
from swarmtrain.observe.events import CheckpointWritten, Event

log = logging.getLogger(__name__)

LIMIT_S = 300.0  # a sample that takes longer is given up
MAX_BYTES = 4096
KEPT = 20


class SampleWriter:
    """A sink of events. It writes `samples/NAME.txt` beside the checkpoints."""

    def __init__(self, state_dir: Path, num_tokens: int) -> None:
        self._directory, self._num_tokens = state_dir / "samples", num_tokens
        self._working = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, CheckpointWritten) and self._working.acquire(blocking=False):
            threading.Thread(target=self._make, args=(Path(event.path),), name="sample", daemon=True).start()

    def _make(self, checkpoint: Path) -> None:
        try:
            text = self._sample(checkpoint)
            self._directory.mkdir(exist_ok=True)
            atomic_write(self._directory / f"{checkpoint.name}.txt", text.encode()[:MAX_BYTES])
            for old in sorted(self._directory.glob("step-*.txt"))[:-KEPT]:
                old.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError, TypeError, StorageError, subprocess.SubprocessError) as error:
            log.info("no sample of %s: %s", checkpoint, error)
        finally:
            self._working.release()

    def close(self) -> None:
        """End the process that is at work, if there is one."""
        if self._process is not None:
            self._process.kill()

    def _sample(self, checkpoint: Path) -> str:
        """Its own process: what it takes is given back, and what goes wrong there does not go wrong here."""
        command = ["nice", "-n", "19", sys.executable, "-m", "swarmtrain", "generate", str(checkpoint), "--json"]
        command += ["--tokens", str(self._num_tokens), "--threads", "1"]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet) as process:
            self._process = process
            try:
                printed, _ = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        return str(json.loads(printed)["text"])
