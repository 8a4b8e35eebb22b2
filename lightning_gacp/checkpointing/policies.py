"""What a recomputation keeps instead of computing it again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
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

    What comes back is of the form that a compiler can read; `with_copies` makes of it what an eager forward needs.

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


def with_copies(contexts: Contexts) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Call ``contexts``, and let an operation that changes a kept output in place find a copy of it kept.

    An activation that works in place on what a convolution or a matrix product gave is common; torch alone would refuse
    the backward pass.
    """
    keeping, replaying = contexts()
    if isinstance(keeping, _CachingTorchDispatchMode):
        keeping = _KeepingCopies(keeping.policy_fn, keeping.storage)
    return keeping, replaying


class _KeepingCopies(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps outputs as torch's own does, and a copy in their place before they are changed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_mutable(func):
            names = (argument.name for argument in func._schema.arguments)
            named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            for argument in func._schema.arguments:
                if argument.is_write:
                    self._copy_kept(named.get(argument.name))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def _copy_kept(self, changed: Any) -> None:
        storages = {_storage(leaf) for leaf in pytree.tree_leaves(changed) if isinstance(leaf, torch.Tensor)}
        # Per operation, torch keeps a list of outputs or, in later versions, a dict.
        for kept in pytree.tree_leaves(list(self.storage.values())):
            value = getattr(kept, "val", None)  # others are marks of what is to be recomputed
            if isinstance(value, torch.Tensor) and _storage(value) in storages:
                kept.val = value.clone()
                kept.version = kept.val._version


def _is_mutable(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)  # higher-order operators have none
    return schema is not None and bool(schema.is_mutable)


def _is_view(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


# Answers that ask for offload; not every torch has them.
_OFFLOADS = tuple(policy for policy in CheckpointPolicy if policy.name.endswith("_CPU_OFFLOAD"))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _ask(policy: PolicyFunction, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
    """Ask the user's function, and refuse answers that torch would take for others."""
    if _is_mutable(args[1]) or _is_view(args[1]):
        # Replayed, what was kept of a change would change nothing, and a kept view would be of nothing.
        return CheckpointPolicy.PREFER_RECOMPUTE
    answer = policy(*args, **kwargs)
    if answer in _OFFLOADS:
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
    operations = [getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()]
    return frozenset(operation for operation in operations if not _is_mutable(operation))  # not `out=`: see `_ask`
