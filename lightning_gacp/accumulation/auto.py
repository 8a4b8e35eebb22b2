"""``num_items="auto"``: counts tokens where it can know that the loss is a mean over them, and says what it chose.

A wrong guess is a wrong gradient, so the rule is narrow: what cannot be known weighs the same, with a warning that
names the setting to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_gacp.accumulation.counters import (
    CausalLMTargets,
    Counter,
    Samples,
    Targets,
    describe,
    first_tensor,
)

_LABEL_KEYS = ("labels", "label", "targets", "target", "y")
# Names of the loss functions of Hugging Face heads. The first shifts the labels itself, except in encoder-decoder
# models.
_SHIFTING_LOSS = "ForCausalLMLoss"
_TOKEN_LOSSES = ("ForMaskedLMLoss", "ForTokenClassification")


class EqualWeights:
    """Every micro-batch counts as one item: the mean of their losses.

    Args:
        advice: What to tell the user, where this was not asked for; to be said when the weights are first used.
    """

    def __init__(self, advice: str = "") -> None:
        self.advice = advice

    def __call__(self, batch: Any) -> int:
        """Counts one batch."""
        return 1

    def __repr__(self) -> str:
        return "micro-batches (each weighs the same)"


def choose_counter(module: nn.Module, batch: Any) -> Counter:
    """Chooses what to count, from the module and its first batch.

    Args:
        module: The module that is trained; its own ``count_items(batch)`` comes first.
        batch: A batch as the loader yields it.

    Returns:
        The counter, with a ``repr`` that says what it counts.
    """
    own = getattr(module, "count_items", None)
    if callable(own):
        return _Own(own)
    if isinstance(batch, Mapping) and isinstance(batch.get("shift_labels"), Tensor):
        return Targets("shift_labels")
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        counter = _hugging_face_counter(module)
        if counter is not None:
            return counter
    return _by_targets(batch)


class _Own:
    def __init__(self, count: Counter) -> None:
        self._count = count

    def __call__(self, batch: Any) -> Any:
        return self._count(batch)

    def __repr__(self) -> str:
        return "the module's own `count_items(batch)`"


def _hugging_face_counter(module: nn.Module) -> Counter | None:
    heads = list(_outermost_pretrained(module))
    if len(heads) != 1:  # none, or a teacher beside a student: whose loss is it?
        return None
    head = heads[0]
    loss = getattr(getattr(head, "loss_function", None), "__name__", "")
    if loss == _SHIFTING_LOSS:
        encoder_decoder = bool(getattr(getattr(head, "config", None), "is_encoder_decoder", False))
        return Targets() if encoder_decoder else CausalLMTargets()
    return Targets() if loss in _TOKEN_LOSSES else None


def _outermost_pretrained(module: nn.Module) -> Iterator[nn.Module]:
    # By name in the MRO: transformers need not be installed, nor imported.
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        yield module
        return
    for child in module.children():
        yield from _outermost_pretrained(child)


def _by_targets(batch: Any) -> Counter:
    key, targets = _find_targets(batch)
    if isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex():
        if targets.ndim and targets.numel() == targets.shape[0]:
            return Samples() if key is None else Targets(key)
        shown: tuple[Any, ...] = tuple(targets.shape)
    elif _is_list(targets):
        shown = (len(targets), "ragged")
    elif first_tensor(batch) is not None:
        return Samples()
    else:
        shown = ()
    return EqualWeights(
        f"`num_items='auto'` found targets of shape {shown} in {describe(batch)} and cannot know whether the loss"
        " is a mean over"
        " them, so every micro-batch weighs the same. If it is a mean over targets, write"
        " `num_items='labels'` (or `lightning_gacp.Targets(key=..., ignore_index=...)`); if it is a mean over samples,"
        " `num_items='samples'`; if equal weights are right, `num_items=None`."
    )


def _find_targets(batch: Any) -> tuple[str | int | None, Any]:
    if isinstance(batch, Mapping):
        key = next((key for key in _LABEL_KEYS if key in batch), None)
        return key, None if key is None else batch[key]
    if isinstance(batch, (list, tuple)) and len(batch) > 1:
        return 1, batch[1]
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        batch = batch[0]
    # A bare tensor of integers with more than one dimension is most likely tokens, which are their own targets.
    return None, batch if isinstance(batch, Tensor) and batch.ndim > 1 and not batch.is_floating_point() else None


def _is_list(targets: Any) -> bool:
    return isinstance(targets, (list, tuple)) and len(targets) > 0 and not isinstance(targets[0], str)
