"""How fast is the reference trainer?

dense against transformers: our trainer with `boundary.kind = "dense"` against a plain `LlamaForCausalLM` loop of the
same shape: the same threads, tokens, microbatches per step, gradient clipping and AdamW; once in fp32 and, where the
processor has it, once in bf16, both under their usual rules (transformers: autocast over fp32 parameters). Ours does
more: it encodes and decodes every boundary tensor, sums gradients exactly in fp64, rounds every operation of AdamW
separately.
subspace against dense: the constrained model against the unconstrained one, both in our trainer.
shares of a microbatch: the time of adding its gradients exactly, and of making its rows of a token table of signs on
every stage, of the whole time of a microbatch. By processor time, in the subspace.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import Figure, figure, parser, report, speed_ratios, take_turns
from transformers import LlamaConfig, LlamaForCausalLM

from swarmtrain.data.sampler import Sampler
from swarmtrain.model import exact
from swarmtrain.model.exact import ExactSum
from swarmtrain.model.table import SignTable
from swarmtrain.native.bf16 import has_bf16
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

SHARES = ["boundary.kind=subspace", "boundary.table=signs"]
PRECISIONS = ("fp32", "bf16")


def plain_step(manifest: Manifest, sampler: Sampler) -> Callable[[], None]:
    """One optimizer step of an ordinary training loop, with the fastest settings that transformers and torch have."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=manifest.is_rounded)
    model = LlamaForCausalLM(plain_config(manifest)).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=manifest.optimizer.learning_rate,
        betas=(manifest.optimizer.beta1, manifest.optimizer.beta2),
        weight_decay=manifest.optimizer.weight_decay,
        fused=True,
    )
    count, steps = manifest.batch.microbatches_per_step, iter(range(10**9))

    def step() -> None:
        t = next(steps)
        for i in range(count):
            tokens = torch.as_tensor(sampler.microbatch(t, i), dtype=torch.int64)  # (s, n + 1)
            with autocast:
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (s, n, v)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].reshape(-1))
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), manifest.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_config(manifest: Manifest) -> LlamaConfig:
    """The same shape."""
    shape = manifest.model
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.sequence_length,
        rms_norm_eps=shape.norm_epsilon,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


@dataclass
class Meter:
    """Adds up the processor time of calls."""

    seconds: float = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, measured."""

        def measured(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return work(*arguments, **options)
            finally:
                self.seconds += time.process_time() - began

        return measured


class Shares:
    """Measures what exact sums and rows of token tables take of a microbatch. Once made, everything takes longer."""

    def __init__(self) -> None:
        self._adding, self._rows = Meter(), Meter()
        exact.largest_of = self._adding.around(exact.largest_of)
        ExactSum.put = self._adding.around(ExactSum.put)  # type: ignore[method-assign]
        SignTable.rows = self._rows.around(SignTable.rows)  # type: ignore[method-assign]

    def figures(self, asked: argparse.Namespace, precision: str) -> list[Figure]:
        """Of all microbatches of a step, one ratio per round."""
        size = f"batch.microbatches_per_step={asked.microbatches}"
        trainer = ReferenceTrainer(preset(asked.preset, [*SHARES, size, f"model.precision={precision}"]))
        whole = Meter()
        trainer._microbatch = whole.around(trainer._microbatch)  # type: ignore[method-assign]
        of_adding, of_rows = [], []
        for number in range(-1, asked.rounds):
            self._adding.seconds = self._rows.seconds = whole.seconds = 0.0
            trainer.step()
            if number >= 0:
                of_adding.append(self._adding.seconds / whole.seconds)
                of_rows.append(self._rows.seconds / whole.seconds)
        return [
            figure(f"exact sums, share of a microbatch, {precision}", of_adding, goal=0.03, at_least=False),
            figure(f"token rows, share of a microbatch, {precision}", of_rows, goal=0.02, at_least=False),
        ]


def speeds(asked: argparse.Namespace, precision: str) -> tuple[list[Figure], str]:
    """The trainers of one precision in turns: figures, and tokens/s in words."""
    common = [f"batch.microbatches_per_step={asked.microbatches}", f"model.precision={precision}"]
    dense, subspace = (
        ReferenceTrainer(preset(asked.preset, [f"boundary.kind={kind}", *common])) for kind in ("dense", "subspace")
    )
    seconds = take_turns(
        {
            "transformers": plain_step(dense.manifest, dense.sampler),
            "dense": dense.step,
            "subspace": subspace.step,
        },
        asked.rounds,
        time.process_time if asked.clock == "cpu" else time.perf_counter,
    )
    tokens = dense.manifest.tokens_per_step
    rates = ", ".join(f"{name} {tokens / statistics.median(found):,.0f}" for name, found in seconds.items())
    return [
        figure(f"dense / transformers, {precision}", speed_ratios(seconds, "dense", "transformers"), goal=1.0),
        figure(f"subspace / dense, {precision}", speed_ratios(seconds, "subspace", "dense"), goal=1.2),
    ], f"{precision} {rates}"


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=1, help="compute threads (1)")
    options.add_argument("--rounds", type=int, default=7, help="rounds of one step each (7)")
    options.add_argument("--microbatches", type=int, default=8, help="microbatches per step (8)")
    options.add_argument("--preset", default="micro", help="whose shape (micro)")
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine (wall)")
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    precisions = PRECISIONS if has_bf16() else PRECISIONS[:1]  # asked before anything is multiplied
    figures, rates = [], []
    for precision in precisions:
        found, text = speeds(asked, precision)
        figures += found
        rates.append(text)
    measured = Shares()
    for precision in precisions:
        figures += measured.figures(asked, precision)
    where = f"median of {asked.rounds}, {asked.threads} threads, preset {asked.preset}"
    notes = [f"tokens/s ({where}): {text}" for text in rates]
    notes += [] if has_bf16() else ["bf16: products fail on this processor"]
    report(figures, as_json=asked.json, notes=notes)


if __name__ == "__main__":
    main()
