"""The compiled simulator (scripts/sim) against the same simulator as it is (swarmtrain sim).

Both simulate the same swarm in turn, each in a process of its own; what counts is the processor time of the simulation,
without starting and compiling. Their traces must be equal, or the comparison means nothing.
  plain / compiled    processor time
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import figure, parser, progress, report

ROOT = Path(__file__).parents[2]
PLAIN = (sys.executable, "-m", "swarmtrain", "sim")
COMPILED = (str(ROOT / "scripts" / "sim"),)


def simulated(command: tuple[str, ...], scenario: list[str]) -> dict[str, Any]:
    """The result of one simulation."""
    done = subprocess.run([*command, *scenario, "--json"], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", type=int, default=2000)
    options.add_argument("--minutes", type=int, default=10)
    chosen = options.parse_args()
    scenario = ["--peers", str(chosen.peers), "--stages", "16", "--minutes", str(chosen.minutes), "--warmup", "1"]
    simulated(COMPILED, ["--peers", "16", "--stages", "16", "--minutes", "2", "--warmup", "1"])  # compiles, if need be
    ratios: list[float] = []
    for number in range(chosen.rounds):
        turns = [PLAIN, COMPILED] if number % 2 == 0 else [COMPILED, PLAIN]
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for command in turns:
            progress(f"round {number + 1} of {chosen.rounds}: {'plain' if command is PLAIN else 'compiled'}")
            found[command] = simulated(command, scenario)
        if found[PLAIN]["trace_digest"] != found[COMPILED]["trace_digest"]:
            raise SystemExit("the two simulators do not give the same trace")
        ratios.append(found[PLAIN]["cpu_s"] / found[COMPILED]["cpu_s"])
    progress("")
    report([figure("plain / compiled", ratios, 1.5)], as_json=chosen.json)


if __name__ == "__main__":
    main()
