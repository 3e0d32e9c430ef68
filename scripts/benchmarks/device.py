"""What does a stage reach on this device?

share of the peak: a microbatch of a middle stage, forward and backward, against a plain product of matrices in the same
precision (model FLOPs utilisation). Both are measured here, one after the other.
offload, layers again: the same microbatch with parameters and sums on the host, and with layers computed again, against
plain. On a graphics card the copies of gradients should hide behind the backward.
memory: the most that the device's tensors, and this process, have held, against what the model of memory tells.
kernels: operations that a microbatch starts on the device. Many small ones are bound by their start.

    scripts/bench device --preset llama-1b --gpu 0      # a graphics card
    scripts/bench device                                # the CPU, a small preset
"""

from __future__ import annotations

from functools import partial

import torch
from common import figure, parser, report, speed_ratios, take_turns
from torch.profiler import ProfilerActivity, profile

from swarmtrain.model.footprint import Offload
from swarmtrain.model.peak import measured_peak
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.model.workload import workload_of
from swarmtrain.native.bf16 import require_bf16
from swarmtrain.peer.options import choose_device
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.trial import one_microbatch, try_stage

WAYS = {
    "plain": (Offload.NOTHING, False),
    "offload": (Offload.STATE, False),
    "offload, sums too": (Offload.SUMS, False),
    "layers again": (Offload.NOTHING, True),
}


def workers(manifest: Manifest, stage: int, device: str) -> dict[str, StageWorker]:
    """The same stage in all ways."""
    found = {}
    for name, (offload, recomputes) in WAYS.items():
        found[name] = StageWorker(StageState(manifest, stage, device=device, offload=offload))
        for module in found[name].state.modules:
            module.recomputes = recomputes
    return found


def num_kernels(worker: StageWorker, device: str) -> int:
    """That one microbatch starts on the device; on a CPU operations of torch."""
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as seen:
        one_microbatch(worker, device)
    return sum(item.count for item in seen.key_averages())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--preset", default="micro")
    options.add_argument("--stage", type=int, default=1)
    options.add_argument("--gpu", type=int, default=None)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--set", nargs="*", default=[], help="section.key=value")
    arguments = options.parse_args()
    manifest, device = preset(arguments.preset, arguments.set), choose_device(arguments.gpu)
    if manifest.is_rounded:
        require_bf16(device)
    dtype = torch.bfloat16 if manifest.is_rounded else torch.float32
    tried = try_stage(manifest, arguments.stage, device, "auto", lambda text: None)
    ways = workers(manifest, arguments.stage, device)
    contestants = {name: partial(one_microbatch, worker, device) for name, worker in ways.items()}
    times = take_turns(contestants, arguments.rounds)
    tflop = workload_of(manifest).stages[arguments.stage].tflop
    peak = measured_peak(device, dtype)
    figures = [
        figure("share of the peak", [tflop / seconds / peak for seconds in times["plain"]], 0.4),
        *(figure(f"{name} / plain", speed_ratios(times, name, "plain"), 0.9) for name in list(WAYS)[1:3]),
        figure("layers again / plain", speed_ratios(times, "layers again", "plain"), 0.7),
        figure("host memory / told", [tried.host_bytes / tried.way.host_bytes], 1.1, at_least=False),
    ]
    if tried.device_bytes:
        ratio = tried.device_bytes / tried.way.device_bytes
        figures.append(figure("device memory / told", [ratio], 1.1, at_least=False))
    figures.append(figure("kernels of a microbatch", [num_kernels(ways["plain"], device)], 2000, at_least=False))
    report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
