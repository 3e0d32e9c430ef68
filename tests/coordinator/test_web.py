"""What the coordinator's two pages may show, and that what is downloaded is a checkpoint's own file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.checkpoint import save_states
from swarmtrain.coordinator.downloads import MAX_SAMPLE_BYTES, Downloads
from swarmtrain.coordinator.public_view import public_events, public_status
from swarmtrain.coordinator.web import View
from swarmtrain.model.state import StageState
from swarmtrain.observe.cost import Cost
from swarmtrain.observe.http import FileBody, HttpServer, Request, Response
from swarmtrain.run.presets import preset
from swarmtrain.simulated.schedule import TINY

MANIFEST = preset("nano", [*TINY, "stages.count=2", "model.num_layers=2"])
PEER = {
    "peer": "12D3KooWpeer", "name": "attic", "stage": 0, "state": "serving", "step": 3, "silent_s": 0.5,
    "microbatches": 3, "forward_ms": 1.0, "backward_ms": 2.0, "capacity": 0.3, "lately": {},
    "doubt": "cut at /ip4/192.0.2.7/tcp/4001", "metrics": "192.0.2.7:9101", "spent": {},
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "kind": "coordinator", "state": "training", "reason": "", "since": 1.0, "next": "", "now": 2.0, "started_at": 0.0,
    "run": "run", "name": "nano", "homepage": "", "step": 3, "steps": 9, "tokens": 1, "tokens_per_step": 1,
    "last": None, "val_loss": None, "split": None, "last_applied_at": 1.0, "seconds_left": None, "routes": [],
    "contributors": [], "checkpoint_step": 0, "stages": [[PEER], []],
    "invite": "st1-secret", "page": "http://192.0.2.7:1/", "excluded": [{"reason": "because"}], "refused": {},
    "memory_bytes": 1, "traffic": {}, "peer": "12D3KooWcoordinator",
}  # fmt: skip


def request(**query: str) -> Request:
    return Request("/checkpoint", query, {})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with a checkpoint of step 0 and a file beside it that is nobody's business."""
    root = tmp_path_factory.mktemp("run")
    (root / "checkpoints").mkdir()
    save_states(root / "checkpoints", [StageState(MANIFEST, stage) for stage in range(2)], keep=1)
    (root / "run.key").write_text("secret")
    (root / "checkpoints" / "step-00000000" / "note.txt").write_text("not of the checkpoint")
    return root


def test_the_public_view_has_no_invite_no_addresses_and_no_texts_of_others() -> None:
    shown = json.dumps(public_status(WHOLE))
    for hidden in ("st1-secret", "192.0.2.7", "because", "KooWcoordinator", "memory"):
        assert hidden in json.dumps(WHOLE)
        assert hidden not in shown
    assert public_status(WHOLE)["stages"][0][0]["doubt"] == "link broken"
    assert public_status({**WHOLE, "state": "waiting", "reason": "stage 1 has no peers"})["reason"]
    assert not public_status({**WHOLE, "state": "starting", "reason": "invite: st1-secret"})["reason"]


def test_public_news_are_those_that_the_run_itself_tells() -> None:
    news = [
        {"number": 1, "event": "phase_reached", "line": "invite: st1-secret", "detail": "st1-secret"},
        {"number": 2, "event": "peer_joined", "line": "attic serves stage 1"},
        {"number": 3, "event": "peer_doubted", "line": "link to /ip4/192.0.2.7"},
        {"number": 4, "event": "checkpoint_written", "line": "checkpoint of step 3", "path": "/home/anna"},
        {"number": 5, "event": "run_ended", "line": "done; checkpoint /home/anna"},
    ]
    shown = public_events(news)
    assert [event["number"] for event in shown] == [2, 4]
    assert "/home" not in json.dumps(shown)


def test_what_is_listed_can_be_downloaded_with_its_digest(place: Path) -> None:
    downloads = Downloads(place / "checkpoints")
    (found,) = downloads.listed()
    assert [file["name"] for file in found["files"]] == [
        "checkpoint.json",
        "stage-000.safetensors",
        "stage-001.safetensors",
    ]
    for file in found["files"]:
        answer = downloads.file(request(step="0", file=file["name"]))
        assert isinstance(answer, FileBody)
        assert answer.path.stat().st_size == file["bytes"]


@pytest.mark.parametrize(
    ("step", "file"),
    [
        ("0", "../../run.key"),
        ("0", "..%2f..%2frun.key"),
        ("0", "/etc/passwd"),
        ("0", "note.txt"),
        ("0", ""),
        ("0", "stage-000.safetensors\x00"),
        ("../..", "run.key"),
        ("1", "stage-000.safetensors"),
        ("-0", "stage-000.safetensors"),
        ("٠", "stage-000.safetensors"),
        ("", ""),
        ("9" * 5000, "stage-000.safetensors"),
    ],
)
def test_nothing_else_can_be_downloaded(place: Path, step: str, file: str) -> None:
    answer = Downloads(place / "checkpoints").file(request(step=step, file=file))
    assert isinstance(answer, Response)
    assert answer.status == 404


def test_samples_are_shown_beside_their_checkpoint_and_bounded(place: Path) -> None:
    downloads = Downloads(place / "checkpoints")
    assert downloads.listed()[0]["sample"] == ""
    (place / "samples").mkdir()
    (place / "samples" / "step-00000000.txt").write_bytes(b"The people\xff" * 1000)
    assert downloads.listed()[0]["sample"].startswith("The people")
    assert len(downloads.listed()[0]["sample"]) <= MAX_SAMPLE_BYTES


def test_a_damaged_checkpoint_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "checkpoint.json").write_text("{")
    assert Downloads(tmp_path).listed() == []
    assert Downloads(tmp_path / "missing").listed() == []


def test_all_viewers_share_one_snapshot() -> None:
    built = []

    def snapshot() -> dict[str, Any]:
        built.append(1)
        return WHOLE

    async def main() -> tuple[bytes, ...]:
        observer = cast(
            Any, SimpleNamespace(snapshot=snapshot, context=SimpleNamespace(events=SimpleNamespace(cost=Cost())))
        )
        view, public = View(observer, is_public=False), View(observer, is_public=True)
        first = [view.message() for _ in range(50)]
        assert all(message is first[0] for message in first)
        return first[0], public.message()

    operators, everybodys = asyncio.run(main())
    assert len(built) == 2
    assert (b"st1-secret" in operators, b"st1-secret" in everybodys) == (True, False)


def test_a_file_larger_than_a_piece_arrives_whole_and_only_so_many_are_sent_at_once(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(range(256)) * 4000)
    body = FileBody(tmp_path / "large", "application/octet-stream", "large")
    missing = FileBody(tmp_path / "none", "application/octet-stream", "none")

    async def ask(server: HttpServer, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    async def main() -> tuple[bytes, bytes, bytes]:
        server = HttpServer({"/large": lambda _: body, "/none": lambda _: missing})
        await server.start("127.0.0.1", 0)
        try:
            found, absent = await ask(server, "/large"), await ask(server, "/none")
            server._num_files = 4
            return found, absent, await ask(server, "/large")
        finally:
            await server.close()

    found, absent, refused = asyncio.run(main())
    head, _, content = found.partition(b"\r\n\r\n")
    assert content == bytes(range(256)) * 4000
    assert b"Content-Length: 1024000" in head
    assert absent.startswith(b"HTTP/1.1 404")
    assert refused.startswith(b"HTTP/1.1 503")
