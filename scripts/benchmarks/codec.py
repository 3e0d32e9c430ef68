"""How fast are the codecs?

against a memory copy: input bytes per second of encode and decode together, against copying the same tensor to memory
that is already there. Both run with torch's threads.
share of a stage: all that a middle stage of the preset `micro` encodes and decodes for one microbatch (its input, its
output, both gradients), against forward, backward and adding up of the same microbatch.
against hivemind: our encoder of quant8 against hivemind's uniform 8-bit one (whose decoder fails on numpy 2.4).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import figure, parser, report, speed_ratios, take_turns
from hivemind.compression import CompressionInfo, Uniform8BitQuantization

from swarmtrain.codec import Direction, MessageContext, decode, make_encoder, parse_spec
from swarmtrain.model.layout import boundary_width
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.native import native
from swarmtrain.run.presets import preset

CONTEXT = MessageContext(0, Direction.FORWARD)
DEFAULT = "quant8"
BOUNDARY = preset("micro", []).wire.forward  # the default codec of boundary tensors


def round_trip(spec: str, tensor: torch.Tensor) -> Callable[[], object]:
    """Encode and decode one message."""
    encoder = make_encoder(parse_spec(spec), boundary=0, direction=Direction.FORWARD)
    return lambda: decode(encoder.encode(tensor, CONTEXT).payload, CONTEXT)


def stage_pass() -> tuple[Callable[[], object], torch.Tensor]:
    """Forward and backward of one microbatch on a middle stage of `micro`; and a tensor of its boundary."""
    manifest = preset("micro", [])
    worker = StageWorker(StageState(manifest, 1))
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length)
    tokens = torch.randint(manifest.model.vocab_size, (shape[0], shape[1] + 1))
    boundary = torch.randn(*shape, boundary_width(manifest))

    def once() -> None:
        done = worker.forward(tokens, boundary)
        worker.accumulate(worker.backward(done, torch.full_like(done.output, 1e-3)))

    return once, boundary


def messages(spec: str, tensor: torch.Tensor) -> Callable[[], object]:
    """What a middle stage does for one microbatch besides computing: two tensors come, two go."""
    one = round_trip(spec, tensor)

    def both() -> None:
        one()
        one()

    return both


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--elements", type=int, default=1 << 22, help="numbers in a message")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread on a busy machine")
    options.add_argument("--also", nargs="*", default=["fp32", "fp16", "quant4"], help="other codecs to measure")
    arguments = options.parse_args()
    tensor = torch.randn(arguments.elements // 1024, 1024, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(tensor)
    encoder = make_encoder(parse_spec(DEFAULT), boundary=0, direction=Direction.FORWARD)
    hivemind_codec, information = Uniform8BitQuantization(), CompressionInfo.from_tensor(tensor)
    specs = [DEFAULT, *arguments.also]
    contestants: dict[str, Callable[[], object]] = {spec: round_trip(spec, tensor) for spec in specs}
    contestants["copy"] = lambda: target.copy_(tensor)
    contestants["encoder"] = lambda: encoder.encode(tensor, CONTEXT)
    contestants["stage"], crossing = stage_pass()
    contestants["its messages"] = messages(BOUNDARY, crossing)
    contestants["its messages, quantized"] = messages(DEFAULT, crossing)
    contestants["hivemind"] = lambda: hivemind_codec.compress(tensor, information)
    clock = time.perf_counter if arguments.clock == "wall" else time.thread_time
    seconds = take_turns(contestants, arguments.rounds, clock)
    figures = [
        figure(f"{DEFAULT} against a memory copy", speed_ratios(seconds, DEFAULT, "copy"), 0.5),
        figure(f"{DEFAULT} encoder against hivemind's", speed_ratios(seconds, "encoder", "hivemind"), 3),
        figure(
            f"{BOUNDARY} as a share of a stage's computing",
            speed_ratios(seconds, "stage", "its messages"),
            0.05,
            at_least=False,
        ),
        figure(
            f"{DEFAULT} as a share of a stage's computing",
            speed_ratios(seconds, "stage", "its messages, quantized"),
            0.05,
            at_least=False,
        ),
        *(figure(f"{spec} against a memory copy", speed_ratios(seconds, spec, "copy"), 0) for spec in arguments.also),
    ]
    loops = "machine code" if native() is not None else "no machine code"
    note = (
        f"{arguments.elements} numbers per message, {torch.get_num_threads()} threads, {loops}, {arguments.clock} clock"
    )
    report(figures, as_json=arguments.json, notes=[note])


if __name__ == "__main__":
    main()
