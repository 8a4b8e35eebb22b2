"""Adding up a few numbers over ranks, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class HostSum:
    """Adds up short lists of numbers over all ranks without touching the device.

    The default process group may be NCCL's, whose result is a device tensor: to read it would synchronise the device
    once or twice a cycle. Counts live on the host, so they get a gloo group of their own.

    Args:
        duplicates: On how many ranks each number stands (tensor-parallel ranks see the same batch).
    """

    def __init__(self, duplicates: int = 1) -> None:
        self._duplicates = duplicates
        # gloo as the default group serves as it is
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def __call__(self, values: Sequence[float]) -> list[float]:
        """Adds up; a collective call. Exact for counts below 2**53 (float64)."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, group=self._group)
        return [number / self._duplicates for number in numbers.tolist()]
