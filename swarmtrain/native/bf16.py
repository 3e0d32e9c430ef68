"""Whether a device multiplies bf16 tensors, which runs with `model.precision` = "bf16" need.

On a processor it is tried: some machines announce instructions that their hypervisor has switched off, and a product
then ends the process (SIGILL). A child process takes that risk, once per machine; the answer lies in the user's cache.
Where the child survives only with fewer instructions allowed, this process allows itself no more either. oneDNN reads
that variable at its first product, so `require_bf16` comes before it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from swarmtrain.errors import HardwareError
from swarmtrain.native import cache_directory, processor

VARIABLE = "ONEDNN_MAX_CPU_ISA"
RESTRICTED = "AVX512_CORE_FP16"  # everything but AMX
_TRIAL_S = 120.0

# Forward and backward of a linear map and of attention. Ends with 3 if the numbers are wrong.
TRIAL = """
import sys, torch
import torch.nn.functional as F
def made(*shape):
    return torch.randn(*shape).bfloat16().requires_grad_(True)
torch.manual_seed(0)
for rows, wide, narrow in ((4, 8, 4), (37, 96, 40), (256, 512, 256)):
    x, w = made(rows, wide), made(narrow, wide)
    y = F.linear(x, w)
    found = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    for mine, exact in zip((y, *found), (x.float() @ w.float().t(), w.float().sum(0).expand(rows, -1),
                                         x.float().sum(0).expand(narrow, -1))):
        if not (mine.float() - exact).abs().max() <= 0.02 * exact.abs().max():
            sys.exit(3)
q = made(1, 4, 64, 32)
F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
"""


class Bf16(StrEnum):
    """What a trial found."""

    WORKS = "works"
    RESTRICTED = "works with fewer instructions"
    FAILS = "fails"


def require_bf16(device: str) -> None:
    """Make products in bf16 safe in this process; HardwareError if the device has none. A first trial takes seconds.

    To be called before the process multiplies anything.
    """
    if device != "cpu":
        import torch

        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise HardwareError(
                f'{torch.cuda.get_device_name(device)} has no bf16, which model.precision = "bf16" needs',
                fix="choose another --gpu, or --cpu",
            )
        return
    found = tried()
    if found is Bf16.FAILS:
        raise HardwareError(
            'products in bf16 fail on this processor, and model.precision = "bf16" needs them; '
            f"{VARIABLE}={RESTRICTED} does not help",
            fix='take another machine, or a run with model.precision = "fp32"',
        )
    if found is Bf16.RESTRICTED:
        os.environ[VARIABLE] = RESTRICTED


def has_bf16(device: str = "cpu") -> bool:
    """The same as an answer."""
    try:
        require_bf16(device)
    except HardwareError:
        return False
    return True


@functools.cache
def tried() -> Bf16:
    """What this machine's processor does, from the cache if it is there."""
    known = _known()
    try:
        return Bf16(known.read_text()) if known is not None else try_processor()
    except (OSError, ValueError):  # not there yet, or damaged
        found = try_processor()
        _remember(known, found)
        return found


def try_processor(trial: str = TRIAL) -> Bf16:
    """Try it, as this process is set up and then with fewer instructions."""
    if _survives(trial, {}):
        return Bf16.WORKS
    return Bf16.RESTRICTED if _survives(trial, {VARIABLE: RESTRICTED}) else Bf16.FAILS


def _survives(trial: str, environment: dict[str, str]) -> bool:
    """Whether a child ends well. HardwareError if something else than the processor ended it."""
    command = [sys.executable, "-c", trial]
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    try:
        done = subprocess.run(
            command, env=everything, capture_output=True, text=True, timeout=_TRIAL_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HardwareError(f"products in bf16 cannot be tried: {error}", fix="try again") from error
    if done.returncode not in (0, 3, -signal.SIGILL):
        last = done.stderr.strip().rpartition("\n")[2][:200]
        raise HardwareError(f"products in bf16 cannot be tried: {last or done.returncode}", fix="try again")
    return done.returncode == 0


def _known() -> Path | None:
    """Where the answer is kept; None if there is no place for it."""
    software = (os.uname().release, version("torch"), os.environ.get(VARIABLE, ""), TRIAL)
    what = b"\0".join([processor(), *(part.encode() for part in software)])
    try:
        return cache_directory() / f"bf16-{hashlib.sha256(what).hexdigest()[:16]}"
    except OSError:
        return None


def _remember(path: Path | None, found: Bf16) -> None:
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(found.value)
        part.replace(path)
    except OSError:  # a cache: the next process tries again
        part.unlink(missing_ok=True)
