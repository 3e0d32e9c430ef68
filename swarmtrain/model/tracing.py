"""How many bytes of tensors a piece of work holds at most, counted as it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make within the block, until they are freed.

    What an operation needs inside itself is not seen. Tensors without data (meta, fake) count like others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count what it made."""
        given = tree_leaves((args, kwargs))
        for leaf in given:  # what was there before the block is not its work
            if isinstance(leaf, Tensor):
                self._see(leaf, counts=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, counts=True)
        return result

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        name = id(storage)  # python keeps one object for a storage as long as that lives
        if name in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known.add(name)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, name, size)

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.live -= size


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` holds beside what was there before it."""
    counted = LiveBytes()
    with counted, torch.enable_grad():
        work()
    return counted.peak
