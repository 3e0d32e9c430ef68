"""A timed 1F1B pipeline: who computes what when, and who waits for which gradient. Whole numbers of time, so exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Send = tuple[int, int]  # a gradient: the stage that sends it to the one before, and its microbatch


@dataclass(frozen=True)
class Pipeline:
    """`warm_up` forwards per following stage come before a stage's first backward.

    One is the plain 1F1B; with two (eager 1F1B) there is a forward to compute while a message is on its way.
    """

    num_stages: int
    num_microbatches: int
    warm_up: int
    forward: int = 10  # time of a forward, of a backward, and of an activation on the wire
    backward: int = 20
    activation: int = 0

    def order(self, stage: int) -> list[tuple[str, int]]:
        """The work of one stage: warm-up forwards, then pairs, then the remaining backwards (the epilogue)."""
        total = self.num_microbatches
        first = min(self.warm_up * (self.num_stages - 1 - stage), total)
        order = [("forward", index) for index in range(first)]
        for index in range(total - first):
            order += [("forward", first + index), ("backward", index)]
        return order + [("backward", index) for index in range(total - first, total)]

    def epilogue(self) -> set[Send]:
        """The gradients that arrive at a stage without a forward left: those that Optimus-CC compresses."""
        count = {stage: self.warm_up * (self.num_stages - stage) for stage in range(1, self.num_stages)}
        total = self.num_microbatches
        return {(stage, total - 1 - back) for stage in count for back in range(min(count[stage], total))}

    def first(self) -> set[Send]:
        """Each stage's first gradient, for which the next one waits while the pipeline fills."""
        return {(stage, 0) for stage in range(1, self.num_stages)}

    def run(self, gradient: Callable[[Send], int]) -> Timeline:
        """Everything as early as it can be; `gradient` says how long a gradient is on the wire."""
        orders = [self.order(stage) for stage in range(self.num_stages)]
        free = [0] * self.num_stages
        ends: dict[tuple[str, int, int], int] = {}
        found = Timeline()
        while any(orders):
            for stage, order in enumerate(orders):
                while order and (ready := self._ready(order[0], stage, ends, gradient)) is not None:
                    kind, microbatch = order.pop(0)
                    if kind == "backward" and stage < self.num_stages - 1:
                        sent_at = ends["backward", stage + 1, microbatch]
                        found.other_work[stage + 1, microbatch] = max(0, free[stage] - sent_at)
                        found.idle[stage + 1, microbatch] = max(0, ready - free[stage])
                    duration = self.forward if kind == "forward" else self.backward
                    free[stage] = ends[kind, stage, microbatch] = max(free[stage], ready) + duration
        found.end = max(free)
        return found

    def _ready(
        self,
        work: tuple[str, int],
        stage: int,
        ends: dict[tuple[str, int, int], int],
        gradient: Callable[[Send], int],
    ) -> int | None:
        """When the input of `work` is there; None if that is not known yet."""
        kind, microbatch = work
        if kind == "forward" and stage == 0:
            return 0
        if kind == "backward" and stage == self.num_stages - 1:
            return ends.get(("forward", stage, microbatch))
        sender = stage - 1 if kind == "forward" else stage + 1
        sent_at = ends.get((kind, sender, microbatch))
        wire = self.activation if kind == "forward" else gradient((sender, microbatch))
        return None if sent_at is None else sent_at + wire


@dataclass
class Timeline:
    """What came of it, by gradient."""

    other_work: dict[Send, int] = field(default_factory=dict)  # what its receiver still has to do when it is sent
    idle: dict[Send, int] = field(default_factory=dict)  # how long its receiver stands idle before it comes
    end: int = 0
