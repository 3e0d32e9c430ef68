"""`peer.toml`: written once, read by `join`, below the environment and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import typer
from typer.main import get_command

from swarmtrain.cli import daemons
from swarmtrain.cli.main import app
from swarmtrain.cli.manners import step_back, usual_threads
from swarmtrain.cli.profile import is_from_profile, profile_text, read_profile
from swarmtrain.errors import UsageError

from .programs import call


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "swarmtrain" / "peer.toml"


def parsed(*arguments: str) -> dict[str, Any]:
    """What `join` is called with."""
    root: Any = get_command(app)
    command = root.commands["join"]
    with typer.Context(root, info_name="swarmtrain", auto_envvar_prefix="SWARMTRAIN") as parent:
        context = command.make_context("join", list(arguments), parent=parent)
    found: dict[str, Any] = {**context.params, "gpu_from_profile": is_from_profile(context, "gpu")}
    return found


def test_init_writes_a_file_that_join_reads_and_never_replaces_one(home: Path) -> None:
    assert call("init").code == 0
    written = home.read_text()
    assert parsed()["threads"] == usual_threads()
    again = call("init")
    assert again.code == 2
    assert "--force" in again.err
    home.write_text("threads = 1\n")
    assert call("init", "--force").code == 0
    assert home.read_text() == written


def test_every_line_of_the_template_is_an_option_of_join(home: Path) -> None:
    """Those that are comments, too."""
    lines = [line.removeprefix("# ") for line in profile_text().splitlines() if "=" in line]
    home.parent.mkdir(parents=True)
    home.write_text("\n".join(lines))
    keys = tomllib.loads(home.read_text())
    assert {"name", "hours", "max_traffic", "gpu", "pause_while"} <= keys.keys()
    found = parsed()
    assert {key: found[key] for key in keys} == keys


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text('max_up = "1mbit"\nmax_down = "2mbit"\nname = "file"\nhours = ["22:00-07:00"]\ngpu = 0\n')
    with mock.patch.dict(os.environ, {"SWARMTRAIN_JOIN_MAX_DOWN": "20mbit", "SWARMTRAIN_JOIN_NAME": "environment"}):
        found = parsed("--name", "line", "--cpu")
    assert (found["max_up"], found["max_down"], found["name"]) == ("1mbit", "20mbit", "line")
    assert found["hours"] == ["22:00-07:00"]
    assert found["gpu_from_profile"], "so --cpu on the command line does not contradict it"
    assert parsed("--profile", "off")["max_up"] == ""
    assert not parsed("--gpu", "1")["gpu_from_profile"]


def test_another_file_can_be_named(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "night.toml"
    other.write_text('name = "owl"\n')
    assert parsed("--profile", str(other))["name"] == "owl"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_upp = 1", "did you mean max_up?"),
        ("name = ", "is not TOML"),
        ("[hours]\nx = 1", "hours is a dict"),
        ("hours = [1]", "hours is a list"),
        ("test_faults = true", "no option"),
    ],
)
def test_a_profile_that_cannot_be_meant_is_refused_with_its_key(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_profile(path, {"max_up", "name", "hours"})
    assert what in f"{caught.value} {caught.value.fix}"


def test_a_profile_that_is_named_must_be_there(home: Path, tmp_path: Path) -> None:
    done = call("join", "--profile", str(tmp_path / "none.toml"))
    assert done.code == 2
    assert "none.toml" in done.err


def test_a_value_of_the_profile_is_checked_as_on_the_command_line(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("traffic_day = 31\n")
    done = call("join", "st1-x")
    assert done.code == 2
    assert "--traffic-day" in done.err


def test_a_daemon_steps_back_for_other_programs_and_its_children_with_it() -> None:
    script = (
        "from swarmtrain.cli.manners import step_back; import psutil, subprocess, sys; step_back(10);"
        "print(psutil.Process().nice(), subprocess.run(['nice'], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "10"]
    before = psutil.Process().nice()
    step_back(0)
    assert psutil.Process().nice() == before


def test_a_core_is_left_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    assert usual_threads() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert usual_threads() == 1, "a container may use fewer cores than the machine has"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert usual_threads() == 1


def test_a_daemon_runs_where_there_is_no_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    ran = []

    async def main() -> None:
        ran.append(True)

    daemons.run_loop(main())
    assert ran == [True]
