"""``num_items="auto"``: counts tokens where it can know that the loss is a mean over them, and says what it chose.

A wrong guess is a wrong gradient, so the rule is narrow: what cannot be known weighs the same, with a warning that
names the setting to write.
"""

from __future__ import annotations

import inspect
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
# Names of the loss functions of Hugging Face heads. The first shifts the labels itself, but not for encoder-decoder
# models. It is also what `loss_function` answers for classes that have no loss (`BertModel`), and for decoders that
# compute theirs without it (`BartForCausalLM`): most of those do not shift, some do.
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
    if isinstance(_look_up(batch, "shift_labels"), Tensor):
        return Targets("shift_labels")
    counter = _hugging_face_counter(module)
    if counter is not None:
        labels = _look_up(batch, "labels")
        if isinstance(labels, Tensor) and labels.ndim == 2:  # with more, several codebooks have a loss each
            return counter
        if _find_targets(batch)[1] is None:  # the step makes the labels: which of them count is not to be seen here
            return EqualWeights(_advice("no labels", batch))
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
    calls = _calls_loss_function(head)
    if getattr(head, "loss_type", None) is None and not (type(head).__name__.endswith("LMHeadModel") and calls):
        return None
    loss = getattr(getattr(head, "loss_function", None), "__name__", "")
    if loss == _SHIFTING_LOSS:
        if getattr(getattr(head, "config", None), "is_encoder_decoder", False):
            return Targets()
        return CausalLMTargets() if calls else None
    return Targets() if loss in _TOKEN_LOSSES else None


def _calls_loss_function(head: nn.Module) -> bool:
    """Whether the loss may come from ``loss_function``: in ``GPT2LMHeadModel`` it does, in ``XLNetLMHeadModel`` not."""
    forward = inspect.unwrap(type(head).forward)
    return "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _outermost_pretrained(module: nn.Module) -> Iterator[nn.Module]:
    # By name in the MRO: transformers need not be installed, nor imported.
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        yield module
        return
    for child in module.children():
        yield from _outermost_pretrained(child)


def _by_targets(batch: Any) -> Counter:
    key, targets = _find_targets(batch)
    leaves = list(_leaves(targets))
    doubtful = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or _several_a_sample(leaf)]
    if doubtful:
        first = doubtful[0]
        shown = f"targets of shape {tuple(first.shape)}" if isinstance(first, Tensor) else "a list of targets"
        return EqualWeights(_advice(shown, batch))
    if isinstance(targets, Tensor) and key is not None and targets.ndim and not targets.is_floating_point():
        return Targets(key)  # one a sample; those that the loss ignores do not count
    return Samples() if first_tensor(batch) is not None else EqualWeights(_advice("no tensor", batch))


def _several_a_sample(targets: Tensor) -> bool:
    if targets.is_floating_point() or targets.is_complex() or targets.ndim == 0:
        return False
    return targets.numel() != targets.shape[0]


def _advice(found: str, batch: Any) -> str:
    return (
        f"`num_items='auto'` found {found} in {describe(batch)} and cannot know what the loss is a mean over, so"
        " every micro-batch weighs the same. If it is a mean over targets, write `num_items='labels'` (or"
        " `'causal_lm'`, or `lightning_gacp.Targets(key=..., ignore_index=...)`); if it is a mean over samples,"
        " `num_items='samples'`; if equal weights are right, `num_items=None`."
    )


def _look_up(batch: Any, key: str) -> Any:
    """A field of a mapping or of an object with attributes."""
    if isinstance(batch, Mapping):
        return batch.get(key)
    return None if isinstance(batch, (Tensor, list, tuple)) else getattr(batch, key, None)


def _find_targets(batch: Any) -> tuple[str | int | None, Any]:
    """Where the targets are most likely to be, and what stands there; ``None`` for a place that no key names."""
    if isinstance(batch, (list, tuple)):
        fields = getattr(batch, "_fields", ())
        index = next((fields.index(key) for key in _LABEL_KEYS if key in fields), 1)
        if len(batch) > 1:
            return index, batch[index]
        batch = batch[0] if batch else None
    if isinstance(batch, Tensor):
        # A bare tensor of integers with more than one dimension is most likely tokens, which are their own targets.
        return None, batch if batch.ndim > 1 and not batch.is_floating_point() else None
    key = next((key for key in _LABEL_KEYS if _look_up(batch, key) is not None), None)
    return key, None if key is None else _look_up(batch, key)


def _leaves(targets: Any) -> Iterator[Any]:
    """The tensors in targets, and every list in them as it is: its length says nothing about the loss."""
    if isinstance(targets, Mapping):
        for value in targets.values():
            yield from _leaves(value)
    elif isinstance(targets, Tensor) or (isinstance(targets, (list, tuple)) and _holds_targets(targets)):
        yield targets


def _holds_targets(values: Any) -> bool:
    return any(not isinstance(value, (str, float)) for value in values)
