"""How fast is the reference trainer?

dense against transformers: our trainer with `boundary.kind = "dense"` against a plain `LlamaForCausalLM` loop of the
same shape: fp32, the same threads, tokens, microbatches per step, gradient clipping and AdamW. Ours does more: it
encodes and decodes every boundary tensor, sums gradients exactly in fp64, rounds every operation of AdamW separately.
subspace against dense: the constrained model against the unconstrained one, both in our trainer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import figure, parser, report, speed_ratios, take_turns
from transformers import LlamaConfig, LlamaForCausalLM

from swarmtrain.data.sampler import Sampler
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset


def plain_step(manifest: Manifest, sampler: Sampler) -> Callable[[], None]:
    """One optimizer step of an ordinary training loop, with the fastest settings that transformers and torch have."""
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
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (s, n, v)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
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
    size = f"batch.microbatches_per_step={asked.microbatches}"
    dense = ReferenceTrainer(preset(asked.preset, ["boundary.kind=dense", size]))
    subspace = ReferenceTrainer(preset(asked.preset, ["boundary.kind=subspace", size]))
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
    report(
        [
            figure("dense / transformers", speed_ratios(seconds, "dense", "transformers"), goal=0.95),
            figure("subspace / dense", speed_ratios(seconds, "subspace", "dense"), goal=1.0),
        ],
        as_json=asked.json,
        notes=[f"tokens/s (median of {asked.rounds}, {asked.threads} threads, preset {asked.preset}): {rates}"],
    )


if __name__ == "__main__":
    main()
