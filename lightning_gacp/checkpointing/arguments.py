"""The arguments of one call of a block: taken apart, put together again, and freed of key-value caches."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

# What transformers and its relatives call the cache of keys and values that a layer reads and extends.
_CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache", "cache_params"})


# What is neither a tensor nor a container, and needs no closer look.
_PLAIN = frozenset({type(None), bool, int, float, str})


class _Place:
    """Stands where a tensor was."""


class _Registered:
    """A container of another kind that torch's pytree knows, such as a named tuple, with its tensors replaced."""

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.leaves = leaves
        self.spec = spec


class Template:
    """The arguments of a call without their tensors."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._args = args
        self._kwargs = kwargs

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the arguments anew, in containers of their own."""
        remaining = list(reversed(tensors))
        args, kwargs = _fill(self._args, remaining), _fill(self._kwargs, remaining)
        assert not remaining
        return args, kwargs


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Template]:
    """Separate the tensors of a call, however deep they lie in tuples, lists and dicts, from the rest.

    `torch.utils.checkpoint` keeps, offers for offload, and stashes the random state of the devices of, only the tensors
    that it gets as positional arguments; and keyword arguments that are named like its own never arrive. Objects that
    are no containers, such as dataclasses, pass as they are. (By hand: torch's pytree takes several times as long.)
    """
    tensors: list[torch.Tensor] = []
    return tensors, Template(_strip(args, tensors), _strip(kwargs, tensors))


def holds_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block is given lists or dicts, which it may change."""
    return any(_is_container(value) for value in (*args, *kwargs.values()))


def _is_container(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_container(item) for item in value)
    return isinstance(value, (list, dict))


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place
    if kind is tuple:
        return tuple([_strip(item, tensors) for item in value])
    if kind is list:
        return [_strip(item, tensors) for item in value]
    if kind is dict:
        return {key: _strip(item, tensors) for key, item in value.items()}
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    return _Registered([_strip(leaf, tensors) for leaf in leaves], spec)


def _fill(value: Any, remaining: list[torch.Tensor]) -> Any:
    """Undo `_strip`, taking tensors from the end of ``remaining``."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if value is _Place:
        return remaining.pop()
    if kind is tuple:
        return tuple([_fill(item, remaining) for item in value])
    if kind is list:
        return [_fill(item, remaining) for item in value]
    if kind is dict:
        return {key: _fill(item, remaining) for key, item in value.items()}
    if kind is _Registered:
        return pytree.tree_unflatten([_fill(leaf, remaining) for leaf in value.leaves], value.spec)
    return value


def without_caches(
    name: str, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace key-value caches by ``None``: a recomputation would write to them a second time.

    Only caches that are objects. Of lists and dicts a recomputation gets copies, so they are written once.

    Args:
        name: Path of the block, for the warning.
        block: The block.
        forward: Its own ``forward``, whose parameters say which argument is a cache.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The arguments to use, or ``None`` when a cache has content already. Then only a call without recomputation
        computes what was asked for.
    """
    if not any(_is_object(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    names = list(inspect.signature(forward).parameters) if args else []
    given = [*zip(names, args, strict=False), *kwargs.items()]
    caches = [value for key, value in given if _is_object(value) and (key in _CACHE_NAMES or _is_cache_class(value))]
    if not caches:
        return args, kwargs
    if any(_has_content(cache, block) for cache in caches):
        warn_once(
            (type(block).__qualname__, "kept"),
            f"`{name}` was called in training with a key-value cache that has content, which a recomputation would "
            "extend again. The block runs without checkpointing; to save memory, call the model without the cache.",
        )
        return None
    warn_once(
        (type(block).__qualname__, "dropped"),
        f"`{name}` was called in training with a key-value cache, which a recomputation would fill a second time. "
        "Checkpointed blocks run without it; set `use_cache=False` in the configuration of the model.",
    )
    dropped = {id(cache) for cache in caches}
    args = tuple(None if id(value) in dropped else value for value in args)
    kwargs = {key: None if id(value) in dropped else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _is_object(value: Any) -> bool:
    return not (value is None or isinstance(value, (torch.Tensor, bool, int, float, str, tuple, list, dict)))


def _is_cache_class(value: Any) -> bool:
    return any(cls.__name__.endswith("Cache") for cls in type(value).__mro__)


def _has_content(cache: Any, block: nn.Module) -> bool:
    """Whether a cache holds something for this block; what does not say is searched for tensors."""
    index = next((part.__dict__["layer_idx"] for part in block.modules() if "layer_idx" in part.__dict__), 0)
    try:
        return bool(cache.get_seq_length(index) > 0)
    except (AttributeError, TypeError, IndexError, ValueError, NotImplementedError):
        pass  # such as the states of linear attention, which have no length
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        return index < len(layers) and _holds_tensors(layers[index])
    return _holds_tensors(cache)


def _holds_tensors(holder: Any) -> bool:
    if not hasattr(holder, "__dict__"):
        return True  # cannot be looked into
    leaves = pytree.tree_leaves(dict(vars(holder)))
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 0 for leaf in leaves)


_warned: set[tuple[str, str]] = set()


def warn_once(key: tuple[str, str], message: str) -> None:
    """Warn once for each class of blocks, not for each block."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, stacklevel=2)
