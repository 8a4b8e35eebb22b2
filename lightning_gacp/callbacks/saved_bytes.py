"""Count what autograd keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self


class SavedBytes:
    """Context in which the bytes that autograd saves are counted, each storage once, on the device of the model.

    What hooks further inside take away (a checkpoint's intermediate results, offloaded tensors) is not seen, so this is
    what stays on the device until the backward. Tensors pass through unchanged.

    Args:
        leave_out: Tensors that are there anyway, parameters and buffers: their storages are not counted.
        on_change: Called with the total after each tensor that counts.

    Attributes:
        total: Bytes saved so far.
    """

    def __init__(self, leave_out: Iterable[Tensor] = (), on_change: Callable[[int], None] | None = None) -> None:
        self.total = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in leave_out if not tensor.is_meta}
        self._on_change = on_change
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> Self:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> Tensor:
        # Detached, because a node that holds its own output is never freed. Not kept: the graph keeps what it saves, so
        # no other storage takes the same address while the forward runs.
        tensor = tensor.detach()
        if tensor.layout == torch.strided and type(tensor) is Tensor:
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            if pointer and pointer not in self._seen:
                self._seen.add(pointer)
                self.total += storage.nbytes()
                if self._on_change is not None:
                    self._on_change(self.total)
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
