"""`swarmtrain presets` and `swarmtrain manifest`."""

from __future__ import annotations

import typer

from swarmtrain.cli.options import JsonOption, ManifestArgument, SetOption, manifest_from, print_json
from swarmtrain.terminal import print_table, say
from swarmtrain.units import show_count, show_size


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
    headers = (
        "preset",
        "params",
        "trained",
        "stages",
        "k/d",
        "dense\nB/token",
        "wire\nB/token",
        "ratio",
        "stage\nmemory",
    )
    print_table(
        headers,
        [
            (
                row.name,
                show_count(row.num_parameters),
                show_count(row.num_trained),
                str(row.num_stages),
                f"{row.k}/{row.d}",
                str(row.dense_bytes_per_token),
                str(row.wire_bytes_per_token),
                f"{row.ratio:.1f}x",
                show_size(row.max_stage_bytes),
            )
            for row in rows
        ],
    )
    say("")
    say("B/token: one boundary, forward and backward, fp32. Memory: the largest stage, without activations.")


def manifest(preset: ManifestArgument, set_: SetOption = None) -> None:
    """Print a manifest with a comment for every key: a file to start from."""
    print(manifest_from(preset, set_).commented(), end="")
