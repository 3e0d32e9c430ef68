"""`swarmtrain plan`: predict what a run would do with a set of machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.options import JsonOption, ManifestArgument, SetOption, manifest_from, print_json
from swarmtrain.terminal import print_table, say
from swarmtrain.units import show_size

if TYPE_CHECKING:
    from swarmtrain.sim.plan import Forecast, StageForecast

HEADERS = ("stage", "peers", "rate/s", "busy", "memory", "up/day", "down/day")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(plan)


def plan(
    manifest: ManifestArgument,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peers",
            metavar="FILE[=COUNT]",
            help="Peer profile and number of such machines, as in gaming-gpu=8. May be repeated."
            " Default: two gaming GPUs at home per stage.",
        ),
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict tokens per second, bytes per day, memory and the short stage of a run."""
    run = manifest_from(manifest, set_)
    from swarmtrain.model.workload import workload_of
    from swarmtrain.sim.advice import advice
    from swarmtrain.sim.plan import default_profile, forecast
    from swarmtrain.sim.profiles import load_profiles

    workload = workload_of(run)
    profiles = load_profiles(peers) if peers else [(default_profile(workload), 2.0 * len(workload.stages))]
    result = forecast(workload, profiles)
    hint = advice(run, profiles, result)
    if as_json:
        print_json({**result.as_dict(), "advice": hint})
        return
    for line in summary(result):
        say(line)
    say(hint)
    say("")
    print_table(HEADERS, table_rows(result), num_left=0)
    say("")
    say("rate: microbatches per second; busy: what the weakest stage lets it use; bytes: of one peer")
    if not peers:
        say(f"without --peers: two per stage of {profiles[0][0].name}, {profiles[0][0].memory_gb:.3g} GB each")


def summary(result: Forecast) -> list[str]:
    """The run as a whole."""
    lines = [f"{result.name}: {len(result.stages)} stages, {result.num_peers} peers"]
    lines += [f"  left out: {name} (its memory holds no stage)" for name in result.left_out]
    if result.empty_stages:
        need = max(result.stages[stage].memory_bytes for stage in result.empty_stages)
        which = _ranges(result.empty_stages)
        lines.append(f"  no peers for stage {which}: no machine is left that has the memory, up to {show_size(need)}")
    else:
        lines += [
            "",
            f"predicted         {result.tokens_per_s:14,.0f} tokens/s",
            f"upper bound       {result.bound_tokens_per_s:14,.0f} tokens/s (any assignment, no steps)",
            f"one step          {result.step_s:14,.1f} s, of which {result.reduce_s:.1f} s reduce gradients",
            f"short stage       {'none' if result.short_stage is None else result.short_stage:>14}",
        ]
    return lines


def table_rows(result: Forecast) -> list[tuple[str, ...]]:
    """One row for each stage under `HEADERS`, many equal ones in a row together, and one for the coordinator."""
    rows: list[tuple[str, ...]] = []
    for group in _equal_in_a_row(result.stages):
        name = str(group[0].stage) if len(group) == 1 else f"{group[0].stage}-{group[-1].stage}"
        rows.append((name, *_row(group[0])))
    up, down = result.coordinator_up_bytes_per_day, result.coordinator_down_bytes_per_day
    return [*rows, ("coordinator", "", "", "", "", show_size(up), show_size(down))]


def _equal_in_a_row(stages: Sequence[StageForecast]) -> list[list[StageForecast]]:
    groups: list[list[StageForecast]] = []
    for stage in stages:
        if groups and _row(groups[-1][0]) == _row(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _row(stage: StageForecast) -> tuple[str, ...]:
    sizes = (stage.memory_bytes, stage.up_bytes_per_day, stage.down_bytes_per_day)
    return str(stage.num_peers), f"{stage.capacity:.3g}", f"{stage.busy:.0%}", *map(show_size, sizes)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
