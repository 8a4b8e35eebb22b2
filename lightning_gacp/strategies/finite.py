"""Whether gradients are finite, in one question to the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no element of ``tensors`` is infinite or NaN; of sharded tensors, no element of this rank's shard.

    Args:
        tensors: On one device; ``None`` entries are left out.
    """
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    values = [tensor if tensor.layout == torch.strided else tensor.coalesce().values() for tensor in local]
    values = [tensor for tensor in values if tensor.numel()]
    if not values:
        return True
    # The largest magnitude does not overflow, as a sum of squares would.
    return bool(torch.stack([norm.float() for norm in torch._foreach_norm(values, float("inf"))]).isfinite().all())
