"""Gradients that are accumulated in another dtype than their parameters'."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def accumulate_in(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Makes autograd accumulate the gradients of floating-point ``parameters`` in ``dtype``; drops those they have."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point() and parameter.grad_dtype != dtype:
            parameter.grad = None
            parameter.grad_dtype = dtype


def accumulate_in_own(parameters: Iterable[Tensor]) -> None:
    """Undoes ``accumulate_in``."""
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.grad_dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype


def cast_to_own(parameters: Iterable[Tensor]) -> None:
    """Casts gradients to the dtype of their parameters, for the optimizer: ``AdamW`` refuses one of another dtype."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = gradient.to(parameter.dtype)
