"""`prepare` in real processes: killed by SIGKILL, on a full disk, and with a corpus much larger than its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmtrain.data.index import INDEX_FILE

Contents = Callable[[Path], dict[str, bytes]]

# Counts the system calls that make files appear and kills itself just before or just after the N-th.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from swarmtrain.data.prepare import PrepareOptions, prepare
out, die_at, kwargs, *inputs = sys.argv[1:]
calls = 0

def counted(real):
    def call(*arguments):
        global calls
        calls += 1
        if calls == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments)
        calls += 1
        if calls == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

os.fsync = counted(os.fsync)
Path.replace = counted(Path.replace)
prepare(PrepareOptions(tuple(map(Path, inputs)), Path(out), **json.loads(kwargs)))
print(calls)
"""

OUTSIDE = """
import sys
from pathlib import Path
from swarmtrain.data.prepare import PrepareOptions, prepare
print("begin", flush=True)
prepare(
    PrepareOptions((Path(sys.argv[1]),), Path(sys.argv[2]), train_bpe=400, shard_tokens=7000),
    on_progress=lambda progress: print(progress.phase, flush=True),
)
"""


def run_child(out: Path, inputs: list[Path], die_at: int, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(out), str(die_at), json.dumps(options), *map(str, inputs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def inputs(tmp_path: Path, english: bytes) -> list[Path]:
    (tmp_path / "a.txt").write_bytes(english[:40_000])
    lines = english[40_000:90_000].decode().split(". ")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def test_killed_again_and_again_it_ends_with_the_same_bytes(
    tmp_path: Path, inputs: list[Path], contents: Contents
) -> None:
    whole = run_child(tmp_path / "whole", inputs, 0, shard_tokens=15_000)
    assert whole.returncode == 0, whole.stderr
    kills = 0
    for attempt in range(50):
        die_at = (
            9 + attempt % 5
        )  # a shard with its journal takes 12 counts: progress is made, each time to another point
        answer = run_child(tmp_path / "killed", inputs, die_at, shard_tokens=15_000)
        if answer.returncode == 0:
            break
        assert answer.returncode == -signal.SIGKILL, answer.stderr
        kills += 1
    assert kills >= 5
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("die_at", [1, 4, 6, 14, 23, 24])
def test_killed_around_a_rename_one_more_run_is_enough(
    tmp_path: Path, inputs: list[Path], contents: Contents, die_at: int
) -> None:
    options = {"shard_tokens": 60_000}
    assert run_child(tmp_path / "killed", inputs, die_at, **options).returncode == -signal.SIGKILL
    assert run_child(tmp_path / "killed", inputs, 0, **options).returncode == 0
    assert run_child(tmp_path / "whole", inputs, 0, **options).returncode == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("phase", ["training the tokenizer", "tokenizing"])
def test_killed_from_outside_in_either_phase_it_resumes(
    tmp_path: Path, english: bytes, contents: Contents, phase: str
) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(english)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", OUTSIDE, str(text), str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == phase:
                child.kill()
                break
        assert child.wait(timeout=60) == -signal.SIGKILL
    assert not (killed / INDEX_FILE).exists()
    for out in (killed, whole):
        subprocess.run([*command[:-1], str(out)], check=True, timeout=120, capture_output=True)
    assert contents(killed) == contents(whole)


def limited_file_size(command: list[str], limit_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run with files limited to `limit_bytes`: a write beyond fails with "File too large", as on a full disk."""
    limit = f"import resource, os, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}));"
    program = limit + "os.execv(sys.argv[1], sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120)


REPORTING = """
import sys
from pathlib import Path
from swarmtrain.data.prepare import PrepareOptions, prepare
from swarmtrain.errors import StorageError
try:
    prepare(PrepareOptions((Path(sys.argv[1]),), Path(sys.argv[2]), shard_tokens=40_000))
except StorageError as error:
    print(error)
    sys.exit(int(error.exit_code))
"""


def check_failure_and_recovery(
    out: Path, text: Path, answer: subprocess.CompletedProcess[str], contents: Contents
) -> None:
    """After a failed write nothing looks finished, and with space again the same command completes the directory."""
    assert answer.returncode == 8, answer.stderr
    assert "cannot write" in answer.stdout
    assert not (out / INDEX_FILE).exists()
    assert all(path.stat().st_size == 80_000 for path in out.glob("tokens-*.bin"))
    assert not list(out.glob(".*.tmp"))
    command = [sys.executable, "-c", REPORTING, str(text)]
    subprocess.run([*command, str(text.parent / "whole")], check=True, timeout=120)
    copy = text.parent / "copy"
    copy.mkdir()
    for path in out.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    subprocess.run([*command, str(copy)], check=True, timeout=120)
    assert contents(copy) == contents(text.parent / "whole")


def test_a_write_that_the_system_refuses_is_a_storage_error(tmp_path: Path, english: bytes, contents: Contents) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_bytes(english)
    answer = limited_file_size([sys.executable, "-c", REPORTING, str(text), str(out)], 50_000)
    assert "File too large" in answer.stdout
    check_failure_and_recovery(out, text, answer, contents)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root; the test with a limited file size covers the same code")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_a_storage_error(tmp_path: Path, small_disk: Path, english: bytes, contents: Contents) -> None:
    text, out = tmp_path / "a.txt", small_disk / "out"
    text.write_bytes(english)
    command = [sys.executable, "-c", REPORTING, str(text), str(out)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "No space left on device" in answer.stdout
    assert len(list(out.glob("tokens-*.bin"))) == 3
    check_failure_and_recovery(out, text, answer, contents)


MEASURED = """
import resource, sys
from pathlib import Path
from swarmtrain.data.prepare import PrepareOptions, prepare
tokenizer = sys.argv[3]
prepare(PrepareOptions((Path(sys.argv[1]),), Path(sys.argv[2]), tokenizer=tokenizer, shard_tokens=1 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(
    ("tokenizer", "small_mb", "large_mb", "allowed_mb"),
    [("bytes", 8, 96, 16), pytest.param("bpe", 3, 9, 24, marks=pytest.mark.long)],
)
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, bpe_file: Path, english: bytes, tokenizer: str, small_mb: int, large_mb: int, allowed_mb: int
) -> None:
    """The larger file is several times what the growth may be, so holding it, or its tokens, would be seen."""
    peak_kb = []
    for size_mb in (small_mb, large_mb):
        path = tmp_path / f"{size_mb}.txt"
        with path.open("wb") as file:
            for _ in range(size_mb * 10 // 3):
                file.write(english)
        name = str(bpe_file) if tokenizer == "bpe" else "bytes"
        command = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / f"out{size_mb}"), name]
        answer = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        peak_kb.append(int(answer.stdout))
    assert peak_kb[1] - peak_kb[0] < allowed_mb * 1024
