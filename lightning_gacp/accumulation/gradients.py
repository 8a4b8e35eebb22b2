"""What is done to gradients in a cycle: scaled, set aside, put back, filled with zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def scale_(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiplies gradients in place by ``factor``; ``None`` entries are left out."""
    if factor == 1.0:
        return
    found = [_local(gradient) for gradient in gradients if gradient is not None]
    dense = [gradient for gradient in found if gradient.layout == torch.strided]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in found:
        if gradient.layout != torch.strided:  # sparse embeddings: no foreach kernel takes them
            gradient.mul_(factor)


class SetAside:
    """Gradients of one optimizer's parameters, kept out of ``.grad`` for a while."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def take(self, parameters: Sequence[Tensor], copy: bool = False) -> None:
        """Moves the gradients of ``parameters`` here, on top of what is here; ``.grad`` is ``None`` afterwards.

        Args:
            parameters: Whose gradients.
            copy: Copy instead of moving; for gradients that are views of memory that others write (DDP's buckets).
        """
        into, values = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            kept = self._gradients.get(parameter)
            if kept is None:
                self._gradients[parameter] = gradient.clone() if copy else gradient
            else:
                into.append(kept)
                values.append(gradient)
        _add_(into, values)

    def put_back(self, parameters: Sequence[Tensor], add: bool = False) -> None:
        """Gives the gradients back.

        Args:
            parameters: All parameters of the optimizer; those without anything here get no gradient (unless ``add``).
            add: Add to what has come since instead of dropping it.
        """
        into, values = [], []
        for parameter in parameters:
            kept = self._gradients.get(parameter)
            if add and parameter.grad is not None:
                if kept is not None:
                    into.append(parameter.grad)
                    values.append(kept)
            else:
                parameter.grad = kept
        _add_(into, values)
        self._gradients.clear()

    def clear(self) -> None:
        """Drops everything."""
        self._gradients.clear()

    def tensors(self) -> list[Tensor]:
        """What is kept here."""
        return list(self._gradients.values())

    def parameters(self) -> list[Tensor]:
        """Whose gradients are kept here."""
        return list(self._gradients)

    def get(self, parameter: Tensor) -> Tensor | None:
        """What is kept for one parameter."""
        return self._gradients.get(parameter)

    def set(self, parameter: Tensor, gradient: Tensor) -> None:
        """Keeps ``gradient`` for ``parameter``."""
        self._gradients[parameter] = gradient


def _add_(into: list[Tensor], values: list[Tensor]) -> None:
    alike = [_placed_alike(target, value) for target, value in zip(into, values, strict=True)]
    if not all(alike):
        for target, value in zip(into, values, strict=True):
            target.add_(value)
    elif into:
        torch._foreach_add_([_local(target) for target in into], [_local(value) for value in values])


def _placed_alike(target: Tensor, value: Tensor) -> bool:
    """Whether to add what lies here is to add the tensors, and a kernel for many at once takes them."""
    here, there = (getattr(tensor, "placements", None) for tensor in (target, value))
    return here == there and target.layout == value.layout == torch.strided


def _local(gradient: Tensor) -> Tensor:
    """What lies on this rank: kernels for many tensors at once take no plain ones beside those of a mesh."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class _Zeros(torch.autograd.Function):
    """A scalar zero whose backward gives every parameter a gradient of exact zeros, whatever the parameter's values."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss of zero that reaches all ``parameters``: its backward runs every gradient hook and adds exact zeros.

    Multiplying a real loss by zero does not do that: a loss over no items is NaN, and NaN times zero is NaN.
    """
    return _Zeros.apply(*(parameter for parameter in parameters if parameter.requires_grad))  # type: ignore[no-any-return,no-untyped-call]
