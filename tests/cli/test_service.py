"""`swarmtrain service`: units that systemd accepts, that confine and drain the peer, and of which nothing stays."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from swarmtrain.cli.service import readable
from swarmtrain.cli.service_unit import Service, quoted
from swarmtrain.observe.events import PeerJoined
from swarmtrain.run.invite import Invite

from .programs import call, environment

INVITE = Invite(
    "0123456789abcdef", bytes(32), ("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGMHdJ2GRqxJ9iHcZ7ds6uHm4mUTizVXE2j7FTkPeUxoM",)
)
with_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
KINDS = {"user": (), "system": ("--system",)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "SWARMTRAIN_INVITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", "/opt/swarmtrain")  # a service of the machine cannot read homes
    return tmp_path / "home"


def files(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if not path.is_dir() or path.is_symlink())


def unit_of(root: Path) -> tuple[Path, str]:
    (path,) = [path for path in root.rglob("swarmtrain.service") if not path.is_symlink()]
    return path, path.read_text()


def command_in(unit: str) -> list[str]:
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]


@pytest.mark.parametrize("kind", list(KINDS))
def test_installing_writes_a_unit_that_starts_with_the_machine_and_uninstalling_leaves_nothing(
    tmp_path: Path, kind: str
) -> None:
    root = tmp_path / "image"
    root.mkdir()
    options = ("--gpu", "1", "--name", "attic 100 %", "--drain-timeout", "90")
    done = call("service", "install", INVITE.text(), *KINDS[kind], "--root", root, "--", *options)
    assert (done.code, done.err) == (0, "")
    path, unit = unit_of(root)
    (link,) = root.rglob("*.wants/swarmtrain.service")
    assert link.resolve() == path.resolve()
    assert command_in(unit)[1:6] == ["-P", "-m", "swarmtrain", "join", INVITE.text()]
    assert command_in(unit)[-6:] == list(options)
    for line in ("Restart=on-failure", "KillMode=mixed", "TimeoutStopSec=120", "NoNewPrivileges=yes", "Nice=10"):
        assert line in unit.splitlines()
    again = call("service", "install", INVITE.text(), *KINDS[kind], "--root", root)
    assert again.code == 0
    assert "--gpu" not in unit_of(root)[1]
    assert call("service", "uninstall", *KINDS[kind], "--root", root).code == 0
    assert files(root) == []


@with_systemd
@pytest.mark.parametrize("kind", list(KINDS))
def test_systemd_accepts_the_unit(tmp_path: Path, kind: str) -> None:
    assert call("service", "install", INVITE.text(), *KINDS[kind], "--root", tmp_path, "--", "--name", "a b").code == 0
    path, _ = unit_of(tmp_path)
    scope = [] if kind == "system" else ["--user"]
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", *scope, "verify", str(path)],
        capture_output=True,
        text=True,
        env=runtime,
        timeout=120,
        check=False,
    )
    about_us = [line for line in done.stderr.splitlines() if "swarmtrain.service" in line]
    assert about_us == []
    broken = tmp_path / "swarmtrain-broken.service"
    broken.write_text(path.read_text().replace("KillMode=mixed", "KillMode=odd"))
    said = subprocess.run(
        ["systemd-analyze", *scope, "verify", str(broken)],
        capture_output=True,
        text=True,
        env=runtime,
        timeout=120,
        check=False,
    )
    assert "swarmtrain-broken.service" in said.stderr  # what is wrong would be seen


@with_systemd
def test_the_machines_unit_is_confined(tmp_path: Path) -> None:
    """By systemd's own measure, from 0 (safe) to 10."""
    assert call("service", "install", INVITE.text(), "--system", "--root", tmp_path).code == 0
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", str(unit_of(tmp_path)[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is too old to judge a file")
    assert done.returncode == 0, done.stdout[-300:]


def test_a_gpu_is_not_hidden_from_a_service_that_computes_on_it() -> None:
    plain = Service(("x",), "run", is_system=True, drain_s=60.0)
    assert "PrivateDevices=yes" in plain.unit()
    gpu = Service(("x",), "run", is_system=True, drain_s=60.0, with_gpu=True).unit()
    assert "PrivateDevices" not in gpu
    assert "ProtectClock" not in gpu  # it restricts devices, too


def test_words_reach_the_program_as_they_are() -> None:
    assert quoted("--name=attic") == "--name=attic"
    assert quoted("100 %") == '"100 %%"'
    assert quoted("$HOME") == '"$$HOME"'
    assert quoted('a"b\\c') == '"a\\"b\\\\c"'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "0"), "--gpus"),
        (("--threads", "0"), "--threads"),
        (("--state-dir", "/x"), "directory of its own"),
        (("--name", "a\nb"), "cannot be printed"),
    ],
)
def test_options_that_join_would_refuse_are_refused_at_once(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = call("service", "install", INVITE.text(), "--root", tmp_path, "--", *arguments)
    assert done.code == 2
    assert said in done.err
    assert files(tmp_path) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    (folder / "swarmtrain.service").write_text("[Unit]\nDescription=somebody's\n")
    for verb in (("install", INVITE.text()), ("uninstall",)):
        done = call("service", *verb, "--system", "--root", tmp_path)
        assert (done.code, "not a service of swarmtrain" in done.err) == (2, True)
    assert (folder / "swarmtrain.service").read_text() == "[Unit]\nDescription=somebody's\n"
    assert call("service", "install", INVITE.text(), "--unit", "../x", "--root", tmp_path).code == 2
    assert call("service", "stop").code == 2  # nothing is installed


def test_a_machine_service_in_a_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/eve/venv")
    done = call("service", "install", INVITE.text(), "--system", "--root", tmp_path)
    assert (done.code, "cannot read /home/eve/venv" in done.err) == (2, True)


def test_the_command_of_the_unit_runs(tmp_path: Path) -> None:
    """It gets as far as an invite allows that leads nowhere, and stops when systemd asks it to."""
    done = call("service", "install", INVITE.text(), "--root", tmp_path, "--", "--listen", "/ip4/127.0.0.1/tcp/0")
    assert done.code == 0
    command = command_in(unit_of(tmp_path)[1])
    folder = tmp_path / "state"  # a directory of runs is no program
    (folder / "swarmtrain").mkdir(parents=True)
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), **os.environ},
    ) as peer:
        assert peer.stdout is not None
        first = readable(peer.stdout.readline().strip())
        peer.send_signal(signal.SIGTERM)
        rest, errors = peer.communicate(timeout=120)
    assert "waiting: " in first
    assert peer.returncode == 0, errors
    assert "gone" in rest


def fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/called\n{script}\n')
    path.chmod(0o755)


def test_systemd_is_told_what_happens_and_lingering_ends_with_the_service(tmp_path: Path, home: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    fake(programs, "systemctl", "")
    fake(programs, "loginctl", "[ $1 = show-user ] && echo no; true")
    state = home / ".local/state/swarmtrain/services/swarmtrain"
    with mock.patch.dict(os.environ, {"PATH": f"{programs}:{os.environ['PATH']}"}):
        assert call("service", "install", INVITE.text()).code == 0
        state.mkdir(parents=True)
        assert call("service", "install", INVITE.text(), "--", "--cpu").code == 0  # once more: it is changed
        assert call("service", "stop").code == 0
        assert call("service", "uninstall").code == 0
    called = (programs / "called").read_text().splitlines()
    assert called.count("systemctl --user enable swarmtrain.service") == 2
    assert "systemctl --user stop swarmtrain.service" in called
    assert "systemctl --user disable --now swarmtrain.service" in called
    assert sum("disable-linger" in line for line in called) == 1
    assert files(home) == []
    assert not state.exists()


def test_what_systemd_refuses_leaves_nothing_behind(tmp_path: Path, home: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    fake(programs, "systemctl", "echo System has not been booted with systemd >&2; exit 1")
    fake(programs, "loginctl", "[ $1 = show-user ] && echo no; true")
    with mock.patch.dict(os.environ, {"PATH": f"{programs}:{os.environ['PATH']}"}):
        done = call("service", "install", INVITE.text())
    assert done.code == 5
    assert "System has not been booted with systemd" in done.err
    assert "disable-linger" in (programs / "called").read_text()
    assert files(home) == []


def test_without_systemd_the_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("service", "install", INVITE.text())
    assert done.code == 5
    assert done.err.startswith("ST-SERVICE: there is no ")
    assert done.err.count("\n") == 1


def test_the_journal_is_shown_in_words() -> None:
    event = PeerJoined("peer-abcdefgh", 1, 3)
    assert readable(json.dumps(event.as_dict())).endswith("  peer abcdefgh serves stage 1 from step 4 on")
    for line in ("W net: something", "[1, 2]", '{"event": "unheard_of"}', '{"event": "peer_joined", "stage": 1}'):
        assert readable(line) == line
