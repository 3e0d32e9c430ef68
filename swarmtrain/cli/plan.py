"""`swarmtrain plan`: predict what a run would do with a set of machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.numbers import number
from swarmtrain.cli.options import JsonOption, ManifestArgument, SetOption, manifest_from, print_json
from swarmtrain.terminal import print_table, say
from swarmtrain.units import show_size

if TYPE_CHECKING:
    from swarmtrain.sim.plan import Forecast, StageForecast

HEADERS = ("stage", "peers", "rate/s", "busy", "memory", "host", "up/day", "down/day")


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
    hours_per_day: Annotated[
        float | None,
        number(0.1, 24, help="Hours a day for which a volunteer's machine is there; default: as its profile says."),
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict what machines do that are there at the same time: tokens per second, days, bytes, memory; what limits."""
    run = manifest_from(manifest, set_)
    from swarmtrain.sim.advice import advice
    from swarmtrain.sim.demand import demand_of
    from swarmtrain.sim.plan import default_profiles, forecast
    from swarmtrain.sim.profiles import load_profiles

    workload = demand_of(run)
    profiles = load_profiles(peers) if peers else default_profiles(workload)
    result = forecast(workload, profiles, hours_per_day)
    hint = advice(run, profiles, result)
    if as_json:
        print_json({**result.as_dict(), "advice": hint})
        return
    for line in summary(result):
        say(line)
    say(f"limit: {hint}", indent="  ")
    say("")
    print_table(HEADERS, table_rows(result), num_left=0)
    say("")
    say("rate: microbatches per second; busy: what the weakest stage lets it use;")
    say("memory: of the card, and of the host beside it; of the machine, if it computes on its CPU;")
    say(f"bytes: of one volunteer, whose machine is there {result.hours_per_day:.3g} h a day")
    if not peers:
        named = ", ".join(f"{number:.0f} of {profile.name}" for profile, number in profiles)
        say(f"without --peers: two per stage, {named}", indent="  ")


def summary(result: Forecast) -> list[str]:
    """The run as a whole, in lines that fit 80 columns."""
    lines = [f"{result.name}: {len(result.stages)} stages, {result.num_peers:,} peers"]
    for item in result.idle:
        if item.has_memory and result.empty_stages:
            continue
        why = "steps are no shorter with them" if item.has_memory else "their memory holds no stage"
        lines.append(f"  left out: {item.count:,} of {item.total:,} {item.name[:30]} ({why})")
    if result.empty_stages:
        needs = [result.stages[stage] for stage in result.empty_stages]
        card, host = max(need.memory_bytes for need in needs), max(need.host_bytes for need in needs)
        beside = f" on the card and {show_size(host)} beside it" if host else ""
        lines.append(f"  no peers for stage {_ranges(result.empty_stages)}:")
        return [*lines, f"  no machine is left that has the memory, up to {show_size(card)}{beside}"]
    waits = "all-reduce and refill come on top" if result.waiting_share == 1.0 else "all-reduces in the background"
    return [
        *lines,
        "",
        f"predicted     {result.tokens_per_s:13,.0f} tokens/s, {result.share_of_bound:.0%} of the bound",
        f"upper bound   {result.bound_tokens_per_s:13,.0f} tokens/s (any assignment, no steps)",
        f"one step      {result.step_s:13,.1f} s: {result.work_s:,.1f} s of work; {waits}",
        f"all-reduce    {result.reduce_s:13,.1f} s on idle lines, longest in stage {result.reduce_stage}",
        f"refill        {result.fill_s:13,.1f} s to fill and empty the pipeline",
        f"short stage   {'none' if result.short_stage is None else result.short_stage:>13}",
        f"done in       {result.days:13,.1f} days",
        f"volunteers    {result.num_volunteers:13,} at {result.hours_per_day:.3g} h a day keep so many machines there",
    ]


def table_rows(result: Forecast) -> list[tuple[str, ...]]:
    """One row for each stage under `HEADERS`, many equal ones in a row together, and one for the coordinator."""
    rows: list[tuple[str, ...]] = []
    for group in _equal_in_a_row(result.stages):
        name = str(group[0].stage) if len(group) == 1 else f"{group[0].stage}-{group[-1].stage}"
        rows.append((name, *_row(group[0])))
    up, down = result.coordinator_up_bytes_per_day, result.coordinator_down_bytes_per_day
    return [*rows, ("coordinator", "", "", "", "", "", show_size(up), show_size(down))]


def _equal_in_a_row(stages: Sequence[StageForecast]) -> list[list[StageForecast]]:
    groups: list[list[StageForecast]] = []
    for stage in stages:
        if groups and _row(groups[-1][0]) == _row(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _row(stage: StageForecast) -> tuple[str, ...]:
    sizes = (stage.memory_bytes, stage.host_bytes, stage.up_bytes_per_day, stage.down_bytes_per_day)
    return str(stage.num_peers), f"{stage.capacity:.3g}", f"{stage.busy:.0%}", *map(show_size, sizes)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`"""
    parts: list[list[int]] = []
    for item in numbers:
        if parts and parts[-1][-1] == item - 1:
            parts[-1].append(item)
        else:
            parts.append([item])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
