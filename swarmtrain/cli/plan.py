"""`swarmtrain plan`: what a run would do with a set of machines, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.options import JsonOption, ManifestArgument, SetOption, manifest_from, print_json
from swarmtrain.units import show_size

if TYPE_CHECKING:
    from swarmtrain.sim.plan import Forecast, StageForecast


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
            help="Peer profile and how many such machines, as in peers/gaming-gpu.toml=8. May be repeated."
            " Default: two gaming GPUs at home per stage.",
        ),
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict tokens per second, bytes per day, memory and the short stage of a run."""
    run = manifest_from(manifest, set_)
    from swarmtrain.model.workload import workload_of
    from swarmtrain.sim.plan import default_profile, forecast
    from swarmtrain.sim.profiles import load_profiles

    workload = workload_of(run)
    profiles = load_profiles(peers) if peers else [(default_profile(workload), 2.0 * len(workload.stages))]
    result = forecast(workload, profiles)
    if as_json:
        print_json(result.as_dict())
        return
    print(as_text(result))
    if not peers:
        print(f"without --peers: two per stage of {profiles[0][0].name}, {profiles[0][0].memory_gb:.3g} GB each")


def as_text(result: Forecast) -> str:
    """One screen; many equal stages in a row are one line."""
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
    lines += ["", f"{'stage':>11}{'peers':>7}{'rate/s':>10}{'busy':>7}{'memory':>11}{'up/day':>11}{'down/day':>11}"]
    for group in _equal_in_a_row(result.stages):
        name = str(group[0].stage) if len(group) == 1 else f"{group[0].stage}-{group[-1].stage}"
        lines.append(f"{name:>11}{_row(group[0])}")
    up, down = result.coordinator_up_bytes_per_day, result.coordinator_down_bytes_per_day
    lines.append(f"{'coordinator':>11}{'':>35}{show_size(up):>11}{show_size(down):>11}")
    lines.append("\nrate: microbatches per second; busy: what the weakest stage lets it use; bytes: of one peer")
    return "\n".join(lines)


def _equal_in_a_row(stages: Sequence[StageForecast]) -> list[list[StageForecast]]:
    groups: list[list[StageForecast]] = []
    for stage in stages:
        if groups and _row(groups[-1][0]) == _row(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _row(stage: StageForecast) -> str:
    return (
        f"{stage.num_peers:>7}{stage.capacity:>10.3g}{stage.busy:>7.0%}{show_size(stage.memory_bytes):>11}"
        f"{show_size(stage.up_bytes_per_day):>11}{show_size(stage.down_bytes_per_day):>11}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7`"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
