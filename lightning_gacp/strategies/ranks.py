"""Adding up a few numbers over ranks, on the host."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor

if TYPE_CHECKING:
    _Base = Strategy
else:
    _Base = object


class HostSum:
    """Adds up short lists of numbers over all ranks without touching the device.

    The default process group may be NCCL's, whose result is a device tensor: to read it would synchronise the device
    once or twice a cycle. Counts live on the host, so they get a gloo group of their own.

    Args:
        duplicates: On how many ranks each number stands (tensor-parallel ranks see the same batch).
    """

    def __init__(self, duplicates: int = 1) -> None:
        self._duplicates = duplicates
        # Lightning closes only NCCL's groups at exit; gloo's threads would still run when the interpreter goes.
        atexit.unregister(_close_groups)
        atexit.register(_close_groups)
        self._group = None if _default_group_serves() else dist.new_group(backend="gloo")

    def __call__(self, values: Sequence[float]) -> list[float]:
        """Adds up; a collective call. Exact for counts below 2**53 (float64)."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, group=self._group)
        return [number / self._duplicates for number in numbers.tolist()]

    def close(self) -> None:
        """Closes the group, on this rank; each fit has one."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


class SumsOnHost(_Base):
    """The part of a strategy that adds up over its ranks: one group a fit."""

    _host_sum: HostSum | None = None

    @property
    def _duplicates(self) -> int:
        return 1

    def _sum_over_ranks(self, values: Sequence[float]) -> Sequence[float]:
        if self._host_sum is None:  # first in `setup`, or by a hook before it that asks for the train loader's length
            self._host_sum = HostSum(self._duplicates)
        return self._host_sum(values)

    def teardown(self) -> None:
        """Closes the group."""
        super().teardown()
        if self._host_sum is not None:
            self._host_sum.close()
            self._host_sum = None


def _default_group_serves() -> bool:
    return bool(dist.get_backend() == "gloo")


def average_over_ranks(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    sum_over_ranks: Callable[[Sequence[float]], Sequence[float]],
) -> list[Tensor | None]:
    """Averages gradients over all ranks; a collective call. A gradient that is missing on a rank counts as zero there.

    Args:
        gradients: This rank's gradients.
        parameters: Their parameters.
        sum_over_ranks: Adds up a list of numbers over the ranks.

    Returns:
        Copies on the host; ``None`` where no rank has a gradient.
    """
    found = sum_over_ranks([float(gradient is not None) for gradient in gradients])
    averages: list[Tensor | None] = []
    for gradient, parameter, ranks_with_it in zip(gradients, parameters, found, strict=True):
        if not ranks_with_it:
            averages.append(None)
            continue
        mean = torch.zeros_like(parameter) if gradient is None else gradient.detach().to_dense().clone()
        dist.all_reduce(mean)
        averages.append((mean / dist.get_world_size()).cpu())
    return averages


def _close_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
