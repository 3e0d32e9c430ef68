"""scripts/sim: the compiled simulator is the same simulator; where nothing can be compiled it runs all the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from needs import needs

from swarmtrain.sim.run import simulate
from swarmtrain.sim.scenario import Scenario

ROOT = Path(__file__).parents[2]
HAS_VENV = Path(sys.prefix) != Path(sys.base_prefix) and (Path(sys.prefix) / ".installed[test]").exists()
SWARM = ("--peers", "60", "--stages", "6", "--minutes", "8", "--warmup", "2", "--mean-life", "0.2", "--seed", "5")
SAME = Scenario(num_peers=60, num_stages=6, minutes=8.0, warmup_minutes=2.0, mean_life_s=720.0, seed=5)

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
CAN_COMPILE = shutil.which(COMPILER) is not None and Path(sysconfig.get_path("include"), "Python.h").exists()

pytestmark = needs(HAS_VENV, "the tests do not run in a virtual environment that scripts/test made")


def scripts_sim(place: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """What it prints as JSON, and what it says."""
    done = subprocess.run(
        [ROOT / "scripts" / "sim", *SWARM, *arguments, "--json"],
        env=os.environ | {"SWARMTRAIN_VENV": sys.prefix, "SWARMTRAIN_COMPILED": str(place)} | environment,
        cwd=place.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result, done.stderr


@pytest.mark.long  # a minute of compiling
@needs(CAN_COMPILE, "no C compiler, or no headers of Python")
def test_the_compiled_simulator_gives_the_same_trace_for_both_routers_and_is_compiled_once(tmp_path: Path) -> None:
    place = tmp_path / "compiled"
    for name in ("mine", "swarmtrain-sim-0123456789abcdef"):
        (place / name / "inside").mkdir(parents=True)
        os.utime(place / name, (0, 0))
    first, said = scripts_sim(place)
    assert "compiling" in said
    assert (place / "mine" / "inside").is_dir()
    assert not (place / "swarmtrain-sim-0123456789abcdef").exists(), "an earlier version"
    assert first["trace_digest"] == f"{simulate(SAME).trace_digest:08x}"
    (compiled,) = place.glob("swarmtrain-sim-*")
    program = "import swarmtrain.sim.pipeline as a, swarmtrain.route.finish_time as b; print(a.__file__, b.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], env=os.environ | {"PYTHONPATH": str(compiled)}, capture_output=True
    )
    files = found.stdout.decode().split()
    assert len(files) == 2
    assert all(name.startswith(str(compiled)) and name.endswith(".so") for name in files)

    published, said = scripts_sim(place, "--policy", "swarm")
    assert "compiling" not in said
    expected = simulate(SAME.with_(routing="swarm-latency", rebalance="queue"))
    assert published["trace_digest"] == f"{expected.trace_digest:08x}" != first["trace_digest"]


def test_without_a_compiler_the_simulator_runs_as_it_is_and_says_so(tmp_path: Path) -> None:
    place = tmp_path / "compiled"
    result, said = scripts_sim(place, CC="/no/such/compiler")
    assert "could not compile" in said
    assert str(place / "log") in said
    assert result["trace_digest"] == f"{simulate(SAME).trace_digest:08x}"
    assert [path.name for path in place.iterdir()] == ["log"]
