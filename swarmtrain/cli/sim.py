"""`swarmtrain sim`: the swarm as a discrete-event simulation, with the policies that the daemons run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.numbers import MAX_PEERS, MAX_SEED, number
from swarmtrain.cli.options import JsonOption, manifest_from, print_json
from swarmtrain.errors import UsageError
from swarmtrain.terminal import ProgressBar, counter, print_table

if TYPE_CHECKING:
    from swarmtrain.sim.run import Result
    from swarmtrain.sim.scenario import Scenario

DEFAULT_STAGE_TFLOP = 150.0  # a machine of 30 TFLOP/s then does a microbatch in 5 s
MAX_RUNS = 1000
MAX_STAGES = 4096
MAX_HOURS = 10**6
YEAR_MINUTES = 60 * 24 * 365


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("sim")(sim)


def sim(
    peers: Annotated[int | None, number(1, MAX_PEERS, help="Machines present on average; default: 64.")] = None,
    stages: Annotated[
        list[int] | None, number(1, MAX_STAGES, help="Pipeline stages; default: 4. May be repeated: one run for each.")
    ] = None,
    peers_per_stage: Annotated[int | None, number(1, MAX_PEERS, help="Instead of --peers: machines per stage.")] = None,
    minutes: Annotated[float, number(0.1, YEAR_MINUTES, help="Simulated time.")] = 60.0,
    warmup: Annotated[float, number(0, YEAR_MINUTES, help="Minutes at the start that are not counted.")] = 10.0,
    seed: Annotated[int, number(-MAX_SEED, MAX_SEED, help="Same seed, same trace.")] = 0,
    runs: Annotated[int, number(1, MAX_RUNS, help="Number of seeds, counted up from --seed.")] = 1,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE[:SECONDS][+ROUTING]",
            help="Rebalancing (capacity, queue, none) and routing (finish-time, swarm-latency); or ours, swarm."
            " May be repeated: one run for each. Default: ours.",
        ),
    ] = None,
    manifest: Annotated[
        str | None, typer.Option(metavar="PRESET|MANIFEST", help="Take stages, tensors and steps from a run.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[=WEIGHT]", help="Draw machines from profiles (gaming-gpu, or a file). May be repeated."
        ),
    ] = None,
    no_churn: Annotated[bool, typer.Option("--no-churn", help="No machine joins or leaves.")] = False,
    mean_life: Annotated[float, number(0.01, MAX_HOURS, help="Mean hours that a machine stays.")] = 2.0,
    mean_absence: Annotated[float, number(0.01, MAX_HOURS, help="Mean hours that a machine stays away.")] = 0.5,
    trace: Annotated[
        Path | None, typer.Option(help="Churn from a CSV file of `seconds,change` lines instead of a distribution.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            envvar="SWARMTRAIN_SIM_SET",
            help="Any other parameter of the scenario, as download_s=30; keys of --manifest, as boundary.k=8.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write CSV files and plots into this directory.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a swarm of up to a million machines; prints the share of the upper bound it reaches, and why."""
    from swarmtrain.sim.demand import demand_of
    from swarmtrain.sim.profiles import load_mix, load_trace
    from swarmtrain.sim.scenario import Scenario
    from swarmtrain.sim.settings import with_policy, with_settings, with_workload

    if peers is not None and peers_per_stage is not None:
        raise UsageError("--peers and --peers-per-stage contradict each other")
    if manifest is not None and stages:
        raise UsageError("--stages and --manifest contradict each other", fix="edit the manifest's stages.count")
    if trace is not None and no_churn:
        raise UsageError("--trace and --no-churn contradict each other")
    overrides = [item for item in set_ or [] if _is_of_manifest(item)]
    parameters = [item for item in set_ or [] if not _is_of_manifest(item)]
    if overrides and manifest is None:
        raise UsageError(f"{overrides[0][:60]!r} is for a manifest", fix="add --manifest PRESET|MANIFEST")
    workload = demand_of(manifest_from(manifest, overrides)) if manifest is not None else None
    mix = load_mix(profile or [], workload.mean_tflop if workload else DEFAULT_STAGE_TFLOP)
    base = Scenario(
        minutes=minutes,
        warmup_minutes=warmup,
        seed=seed,
        mean_life_s=3600.0 * mean_life,
        mean_absence_s=3600.0 * mean_absence,
        churn="none" if no_churn else "trace" if trace is not None else "exponential",
        trace=load_trace(trace) if trace is not None else (),
    )
    if mix:
        base = base.with_(mix=mix)
    scenarios = []
    for count in [len(workload.stages)] if workload else stages or [base.num_stages]:
        num_peers = count * peers_per_stage if peers_per_stage is not None else peers or max(base.num_peers, count)
        scenario = base.with_(num_stages=count, num_peers=max(count, num_peers))
        if peers is not None and peers < count:
            raise UsageError(f"{peers} peers cannot serve {count} stages", fix="raise --peers")
        scenario = with_settings(with_workload(scenario, workload) if workload else scenario, parameters)
        for text in policy or ["ours"]:
            chosen = with_policy(scenario, text)
            scenarios += [chosen.with_(seed=seed + number) for number in range(runs)]
    _write_probe(out)
    gc.disable()
    try:
        results = _simulate(scenarios, as_json=as_json)
    finally:
        gc.freeze()  # millions of objects of the last simulation: the process ends without collecting them
        gc.enable()
    _report(results, out, as_json=as_json)


def _is_of_manifest(setting: str) -> bool:
    """Keys of a manifest have a dot; those of a scenario have none, except `rebalance.`."""
    name = setting.partition("=")[0]
    return "." in name and not name.startswith("rebalance.")


def _simulate(scenarios: list[Scenario], *, as_json: bool) -> list[Result]:
    from swarmtrain.sim.report import as_dict, as_text
    from swarmtrain.sim.run import simulate

    if len(scenarios) > MAX_RUNS:
        raise UsageError(f"{len(scenarios)} simulations are too many; at most {MAX_RUNS}")
    results: list[Result] = []
    num_minutes, total = 0, sum(int(scenario.minutes) for scenario in scenarios)
    with ProgressBar() as bar:
        count = counter("simulated minutes", bar)

        def on_minute() -> None:
            nonlocal num_minutes
            num_minutes += 1
            count(num_minutes, total)

        for number, scenario in enumerate(scenarios):
            if number:
                gc.collect()  # the machines of the one before
            result = simulate(scenario, on_minute)
            results.append(result)
            bar.close()
            if as_json:
                print_json(as_dict(result))
            elif len(scenarios) == 1:
                print(as_text(result))
    return results


def _report(results: list[Result], out: Path | None, *, as_json: bool) -> None:
    from swarmtrain.sim.report import TABLE_HEADERS, table_rows, write_csv, write_plots

    if len(results) > 1 and not as_json:
        print_table(TABLE_HEADERS, table_rows(results), num_left=3)
    if out is not None:
        written = write_csv(results, out) + write_plots(results, out)
        if not as_json:
            print("written: " + ", ".join(str(path) for path in written))


def _write_probe(out: Path | None) -> None:
    """Check before the simulation that its results can be written and drawn."""
    if out is None:
        return
    from swarmtrain.sim.report import check_out

    check_out(out)
