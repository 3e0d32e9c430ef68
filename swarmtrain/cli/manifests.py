"""`swarmtrain presets` and `swarmtrain manifest`."""

from __future__ import annotations

import typer

from swarmtrain.cli.options import JsonOption, ManifestArgument, SetOption, manifest_from, print_json


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("presets")(presets)
    app.command("manifest")(manifest)


def presets(as_json: JsonOption = False) -> None:
    """List the presets: parameters, bytes per token on the wire, memory per stage."""
    from swarmtrain.model.sizes import describe
    from swarmtrain.run.presets import PRESETS, preset

    rows = [describe(preset(name)) for name in PRESETS]
    if as_json:
        for row in rows:
            print_json(row.as_dict())
        return
    print(
        f"{'preset':<12}{'parameters':>12}{'trained':>10}{'stages':>8}{'k / d':>12}"
        f"{'dense B/token':>15}{'wire B/token':>14}"
        f"{'ratio':>8}{'memory/stage':>15}"
    )
    for row in rows:
        print(
            f"{row.name:<12}{_short(row.num_parameters):>12}{_short(row.num_trained):>10}"
            f"{row.num_stages:>8}{f'{row.k} / {row.d}':>12}"
            f"{row.dense_bytes_per_token:>15}{row.wire_bytes_per_token:>14}"
            f"{row.ratio:>7.1f}x{_short(row.max_stage_bytes) + 'B':>15}"
        )
    print("\nB/token: one boundary, forward and backward, fp32. Memory: the largest stage, without activations.")


def manifest(preset: ManifestArgument, set_: SetOption = None) -> None:
    """Print a manifest with every key explained: a file to start from."""
    print(manifest_from(preset, set_).commented(), end="")


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} P"
