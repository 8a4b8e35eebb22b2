"""Counters: how many items the loss of a micro-batch is a mean over.

A counter is any callable from the batch, as the loader yields it (on the host, so that counting does not synchronise
the device), to a number.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Counter = Callable[[Any], Any]
_FEW = 64


class CausalLMTargets:
    """Counts the targets of a causal language model: the labels that are left after the shift by one.

    ``shift_labels``, where the batch has them, have been shifted already and count as they are; else
    ``labels[..., 1:]``.

    Args:
        key: Name of the labels in the batch; for tuple batches their index.
        ignore_index: Label that the loss leaves out.

    Raises:
        TypeError: If ``ignore_index`` is no integer, and so no label would equal it.
    """

    def __init__(self, key: str | int = "labels", ignore_index: int = -100) -> None:
        self.key = key
        self.ignore_index = _checked_label(ignore_index)

    def __call__(self, batch: Any) -> int:
        """Counts one batch; labels of shape ``(batch, sequence)``, any integer dtype."""
        if isinstance(batch, Mapping) and "shift_labels" in batch:
            return _count(batch["shift_labels"], self.ignore_index)
        return _count(find_in_batch(batch, self.key, self)[..., 1:], self.ignore_index)

    def __repr__(self) -> str:
        return f"CausalLMTargets(key={self.key!r}, ignore_index={self.ignore_index})"


class Targets:
    """Counts all labels: tokens of a tagger or an encoder-decoder, pixels of a segmentation, classes.

    Args:
        key: Name of the labels in the batch; for tuple batches their index.
        ignore_index: Label that the loss leaves out (255 in many segmentation data sets).

    Raises:
        TypeError: If ``ignore_index`` is no integer, and so no label would equal it.
    """

    def __init__(self, key: str | int = "labels", ignore_index: int = -100) -> None:
        self.key = key
        self.ignore_index = _checked_label(ignore_index)

    def __call__(self, batch: Any) -> int:
        """Counts one batch; labels of any shape, any integer dtype."""
        return _count(find_in_batch(batch, self.key, self), self.ignore_index)

    def __repr__(self) -> str:
        return f"Targets(key={self.key!r}, ignore_index={self.ignore_index})"


class Samples:
    """Counts the first dimension of the batch: for losses that are a mean over samples."""

    def __call__(self, batch: Any) -> int:
        """Counts one batch.

        Raises:
            ValueError: If there is no tensor with a first dimension in it.
        """
        tensor = first_tensor(batch)
        if tensor is None:
            raise ValueError(
                "`num_items='samples'` counts the first dimension of a tensor of the batch, and found none in"
                f" {describe(batch)}."
                " Write a counter of your own instead: `num_items=lambda batch: ...`."
            )
        return int(tensor.shape[0])

    def __repr__(self) -> str:
        return "Samples()"


_NAMES: dict[str, Callable[[], Counter]] = {"causal_lm": CausalLMTargets, "labels": Targets, "samples": Samples}


def make_counter(num_items: str | Counter) -> Counter:
    """Gives the counter that ``num_items`` names.

    Args:
        num_items: ``"causal_lm"``, ``"labels"``, ``"samples"``, the import path of a callable, or a callable.

    Raises:
        ValueError: For an unknown name.
        TypeError: For something that cannot be called.
    """
    if isinstance(num_items, str):
        if num_items in _NAMES:
            return _NAMES[num_items]()
        found = _import(num_items)
        if found is None:
            raise ValueError(
                f"`num_items={num_items!r}` is not a known counter: write one of"
                f" {', '.join(repr(name) for name in ('auto', *_NAMES))}, `None`, or the import path of a callable"
                " such as `my_package.count_tokens`."
            )
        num_items = found() if isinstance(found, type) else found
    if not callable(num_items):
        raise TypeError(
            f"`num_items={num_items!r}` cannot be called: a counter takes a batch and returns how many items its loss"
            " averages over."
        )
    return num_items


def _checked_label(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`ignore_index={value!r}` is no integer, as labels are: write e.g. `ignore_index=-100`.")
    return value


def _import(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name) if module_name else None
    except (ImportError, AttributeError):
        return None


def find_in_batch(batch: Any, key: str | int, counter: Any) -> Tensor:
    """Finds the labels in a batch.

    Args:
        batch: A mapping, a sequence, or an object with attributes.
        key: Their key, index or attribute.
        counter: Who asks; named in the error.

    Returns:
        The labels; lists of numbers are made a tensor.

    Raises:
        ValueError: If there are none.
    """
    labels: Any = None
    # Lists and tuples first: to ask an abstract class takes longer than all the rest.
    if isinstance(batch, (list, tuple)) or (isinstance(batch, Sequence) and not isinstance(batch, str)):
        if isinstance(key, int) and -len(batch) <= key < len(batch):
            labels = batch[key]
    elif isinstance(batch, Mapping):
        labels = batch.get(key)
    elif isinstance(key, str):
        labels = getattr(batch, key, None)
    if isinstance(labels, list) and all(isinstance(label, int) for label in labels):
        labels = torch.tensor(labels)
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"`num_items={counter!r}` looked for labels under `{key!r}` and found none in {describe(batch)}."
            " Name their place, `num_items=lightning_gacp.Targets(key=...)`, or give your module a method"
            " `count_items(self, batch)`."
        )
    return labels


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor with at least one dimension, depth first."""
    if isinstance(batch, Tensor):
        return batch if batch.ndim else None
    if isinstance(batch, Mapping):
        children: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        children = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        children = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        children = getattr(batch, "__dict__", {}).values()
    return next((found for child in children if (found := first_tensor(child)) is not None), None)


def describe(batch: Any) -> str:
    """Names what a batch consists of, for error messages."""
    if isinstance(batch, Mapping):
        return f"a `{type(batch).__name__}` with the keys {sorted(map(str, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"a `{type(batch).__name__}` of {len(batch)}: [{', '.join(type(item).__name__ for item in batch)}]"
    return f"a `{type(batch).__name__}`"


def _count(labels: Tensor, ignore_index: int) -> int:
    if type(labels) is Tensor and labels.is_cpu and not labels.is_floating_point():
        # What takes the least time, within a training step: a list of few labels, an array of many.
        if labels.numel() <= _FEW:
            few = (labels if labels.ndim == 1 else labels.flatten()).tolist()
            return len(few) - few.count(ignore_index)
        return int(np.count_nonzero(labels.numpy() != ignore_index))
    return int((labels != ignore_index).sum())
