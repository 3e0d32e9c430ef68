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
    from swarmtrain.model.footprint import largest
    from swarmtrain.model.sizes import describe
    from swarmtrain.run.presets import PRESETS, preset
    from swarmtrain.sim.demand import demand_of

    manifests = [preset(name) for name in PRESETS]
    rows = [(describe(manifest), demand_of(manifest).wire_bytes_per_token, largest(manifest)) for manifest in manifests]
    if as_json:
        for row, coded, needs in rows:
            print_json({**row.as_dict(), "coded_bytes_per_token": coded, "largest_stage": needs.as_dict()})
        return
    print_table(
        ("preset", "params", "trained", "stages", "k/d", "dense", "wire", "card", "host"),
        [
            (
                row.name,
                show_count(row.num_parameters),
                show_count(row.num_trained),
                str(row.num_stages),
                f"{row.k}/{row.d}",
                str(row.dense_bytes_per_token),
                f"{coded:.3g}",
                show_size(needs.device_bytes),
                show_size(needs.host_bytes),
            )
            for row, coded, needs in rows
        ],
    )
    say("")
    say("Bytes per token over one boundary, forward and backward: a dense one in fp32,")
    say("and the preset's through its codecs. Memory: of the largest stage, on a card")
    say("and on its host, with as much there as a card of 12 GB asks for.")


def manifest(preset: ManifestArgument, set_: SetOption = None) -> None:
    """Print a manifest with a comment for every key: a file to start from."""
    print(manifest_from(preset, set_).commented(), end="")
