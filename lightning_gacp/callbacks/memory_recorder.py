"""Record how many bytes are allocated while operations run: from the allocator of a device, or counted on the CPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PHASES = ("forward", "backward", "recompute", "step")


class Sample(NamedTuple):
    """One point of the curve.

    Attributes:
        ms: Milliseconds since the recording began, at the end of an operation.
        bytes: Bytes allocated then.
        phase: One of `PHASES`, that the operation belongs to.
        micro_batch: Number of the micro-batch in the cycle, from 0.
    """

    ms: float
    bytes: int
    phase: str
    micro_batch: int


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes a sample after every operation inside the context.

    On an accelerator the bytes are the allocator's, known on the host without waiting for the device. A CPU has
    no such allocator: there the bytes are those of the storages that are alive, counted from the tensors given and from
    all outputs of operations, each storage once and until it is freed.

    Args:
        device: The device to look at.
        alive: Tensors that are there already (parameters, buffers, optimizer states), for the CPU.

    Attributes:
        samples: What was recorded.
        phase: To be set by the user of the recorder. A backward in which gradients are enabled is a recomputation, and
            recorded as such.
        micro_batch: To be set by the user of the recorder.
    """

    def __init__(self, device: torch.device, alive: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples: list[Sample] = []
        self.phase = "forward"
        self.micro_batch = 0
        self._device = device
        self._counted: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0
        if device.type == "cpu":
            for tensor in alive:
                self._count(tensor)
        self._start = time.perf_counter()
        self._sample()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._device.type == "cpu":
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._count(leaf)
        if func is not torch.ops.aten.detach.default:  # hooks detach what they are given, in a phase of their own
            self._sample()
        return output

    def _sample(self) -> None:
        phase = self.phase
        # Only recomputation enables gradients while the engine of autograd runs.
        if phase == "backward" and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            phase = "recompute"
        size = self._bytes if self._device.type == "cpu" else torch.accelerator.memory_allocated(self._device)
        self.samples.append(Sample((time.perf_counter() - self._start) * 1e3, size, phase, self.micro_batch))

    def _count(self, tensor: Tensor) -> None:
        """Count a storage until it is freed."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's share on this rank
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a tensor subclass without a storage of its own
            return
        key = storage._cdata
        if key in self._counted or storage.nbytes() == 0:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            del self._counted[key]
            self._bytes -= size

        self._counted[key] = weakref.ref(storage, freed)
        self._bytes += size
