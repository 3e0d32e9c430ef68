"""The reference trainer with several peers in every stage: what a gradient codec costs when shares are rounded apart.

Microbatch i is of peer i % n in every stage. The sums are those of the network, without a network (`reduce/coding.py`).
"""

from __future__ import annotations

import torch

from swarmtrain.reduce.coding import Reduced, StageCoder, together
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest


class ReplicatedTrainer(ReferenceTrainer):
    """Every stage has `num_replicas` peers. Not for tied embeddings, nor for runs with checkpoints."""

    def __init__(self, manifest: Manifest, num_replicas: int) -> None:
        super().__init__(manifest)
        assert not manifest.model.tie_embeddings
        assert not manifest.checkpoint.every
        self._groups = [
            [coder, *(StageCoder(worker.state) for _ in range(num_replicas - 1))]
            for coder, worker in zip(self.coders, self.workers, strict=True)
        ]
        self._shares = [
            [torch.zeros_like(worker.sum.total) for _ in range(num_replicas)] for worker in self.workers
        ]  # by stage and peer

    def _microbatch(self, t: int, i: int) -> float:
        before = [worker.sum.total.clone() for worker in self.workers]
        loss = super()._microbatch(t, i)
        for worker, shares, total in zip(self.workers, self._shares, before, strict=True):
            shares[i % len(shares)] += worker.sum.total - total  # exact, as the sums are
        return loss

    def _reduced(self, index: int) -> Reduced:
        found = together(self._groups[index], [share.cpu() for share in self._shares[index]])
        for share in self._shares[index]:
            share.zero_()
        return found
