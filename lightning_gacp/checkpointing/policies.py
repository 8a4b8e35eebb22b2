"""What a recomputation keeps instead of computing it again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

PolicyFunction: TypeAlias = Callable[..., CheckpointPolicy | bool]
Policy: TypeAlias = str | PolicyFunction
Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Everything whose cost grows with a product of three sizes. Names, because no torch version has all of them.
_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "linear",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_int_mm",
    "convolution",
    "_convolution",
    "mkldnn_convolution",
    "cudnn_convolution",
    "miopen_convolution",
    "_slow_conv2d_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


def contexts_for(policy: Policy) -> Contexts | None:
    """Turn ``policy`` into the ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`; ``None`` for ``"full"``.

    Raises:
        ValueError: An unknown name.
        TypeError: Neither a name nor a function.
    """
    if policy == "full":
        return None
    if policy == "save_matmuls":
        return partial(create_selective_checkpoint_contexts, _keep_matmuls)
    if isinstance(policy, str):
        raise ValueError(f"`policy={policy!r}` must be `full`, `save_matmuls` or a function.")
    if not callable(policy):
        raise TypeError(f"`policy={policy!r}` must be `full`, `save_matmuls` or a function.")
    return partial(create_selective_checkpoint_contexts, partial(_ask, policy))


def _ask(policy: PolicyFunction, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
    """Ask the user's function, and refuse answers that torch would take for others."""
    answer = policy(*args, **kwargs)
    if answer in (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD):
        raise ValueError(
            f"The `policy` function returned `{answer}`, which torch treats as a recomputation unless it compiles. "
            "Return `CheckpointPolicy.MUST_SAVE` or `CheckpointPolicy.PREFER_RECOMPUTE`, or use `offload=True`.",
        )
    return answer


def _keep_matmuls(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = operation in _matmul_operations()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@lru_cache(maxsize=1)
def _matmul_operations() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in _MATMULS]
    return frozenset(getattr(packet, overload) for packet in packets if packet for overload in packet.overloads())
