"""Put layers of behaviour around the ``forward`` of a module without changing the module from outside.

`wrap` swaps the module's class for a generated subclass of the same name. The module object, its parameters, its
hooks, its state dict and every ``isinstance`` stay what they were, a deep copy runs its own weights, and FSDP2, which
swaps classes too, may come before or after. (An instance attribute ``forward`` would be simpler, but the deep copies
of weight averaging would then run the weights of the original.)
"""

import copy
import copyreg
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import Self

ROLES = ("checkpoint", "offload")
"""What can be put around a block, from inside to outside: recomputation must lie within the offload of its inputs."""

_LAYERS = "_gacp_layers"
_GENERATED = "_gacp_original_class"


class Layer(Protocol):
    """What runs in place of a block's ``forward``, and calls it.

    There is one object for each block and role. It lives in the ``__dict__`` of the block and is deep-copied with it.
    """

    def __call__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``forward(*args, **kwargs)``, which is the block's own ``forward`` or the layer inside this one."""


class Applied:
    """What was done to the blocks of a model, and how to undo it. Also a context manager that undoes it at its end."""

    def __init__(self, names: Iterable[str], undo: Callable[[], None]) -> None:
        self.names = list(names)
        """Paths of the changed blocks, in the order of the model."""
        self.engine: Any = None
        """What moves tensors to host memory and counts them, where that was asked for."""
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Give the blocks their own ``forward`` back. Calling it again does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(names={self.names})"


def wrap(block: nn.Module, role: str, layer: Layer) -> None:
    """Put ``layer`` around the ``forward`` of ``block``.

    Args:
        block: The module to change in place.
        role: One of `ROLES`. A block has at most one layer of each.
        layer: Called instead of the ``forward``.

    Raises:
        ValueError: The block has this role already, or the swap of its class would have no effect.
        TypeError: The class of the block cannot be subclassed.
    """
    if role not in ROLES:
        raise ValueError(f"`role={role!r}` must be one of {ROLES}.")
    if layer_of(block, role) is not None:
        raise ValueError(f"`{type(block).__name__}` has a `{role}` layer already; call `remove()` on the first one.")
    refuse_unwrappable(block)
    if _generated_in_mro(type(block)) is None:
        block.__class__ = _generated_class(type(block))
    block.__dict__.setdefault(_LAYERS, {})[role] = layer


def unwrap(block: nn.Module, role: str) -> None:
    """Take the layer of ``role`` off ``block``, and give the class back when it was the last."""
    layers = block.__dict__.get(_LAYERS, {})
    layers.pop(role, None)
    if layers:
        return
    block.__dict__.pop(_LAYERS, None)
    # When something else (FSDP2, a parametrization) has put its class on top, ours stays below it and passes through.
    original = type(block).__dict__.get(_GENERATED)
    if original is not None:
        block.__class__ = original


def layer_of(block: nn.Module, role: str) -> Layer | None:
    """The layer of ``role`` around ``block``."""
    layer: Layer | None = block.__dict__.get(_LAYERS, {}).get(role)
    return layer


def refuse_unwrappable(block: nn.Module) -> None:
    """Raise where `wrap` could not work, and change nothing.

    Raises:
        ValueError: The swap of the class would have no effect, or would break the block.
        TypeError: The class of the block cannot be subclassed.
    """
    cls = type(block)
    if isinstance(block, torch.jit.ScriptModule):
        raise ValueError(
            f"`{cls.__name__}` is a `torch.jit.ScriptModule`, whose `forward` cannot be changed. Use the "
            "module it was scripted from."
        )
    if "forward" in block.__dict__:
        raise ValueError(
            f"`{cls.__name__}.forward` was replaced on the instance, so a change of the class would have no "
            "effect. Undo that replacement, or apply it to the class."
        )
    if "parametrizations" in block._modules and _generated_in_mro(cls) is None:
        raise ValueError(
            f"`{cls.__name__}` is parametrized itself. Wrap the module that holds it, or register the "
            "parametrization afterwards."
        )
    if _generated_in_mro(cls) is None:
        _generated_class(cls)


def _generated_in_mro(cls: type) -> type[nn.Module] | None:
    return next((base for base in cls.__mro__ if _GENERATED in base.__dict__), None)


def _generated_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` that runs layers, made once and found again among the subclasses."""
    for subclass in cls.__subclasses__():
        if subclass.__dict__.get(_GENERATED) is cls:
            return subclass
    namespace: dict[str, Any] = {
        name: cls.__dict__[name] for name in ("__module__", "__qualname__", "__doc__") if name in cls.__dict__
    }
    namespace[_GENERATED] = cls
    namespace["__reduce_ex__"] = _reduce_plain
    if not hasattr(cls, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy_wrapped
    if hasattr(cls, "_orig_cls_mro_index"):
        # FSDP2 finds the class it has wrapped by its place in the method resolution order, which ours moves by one.
        namespace["_orig_cls_mro_index"] = cls._orig_cls_mro_index + 1
    try:
        generated = types.new_class(cls.__name__, (cls,), {}, lambda body: body.update(namespace))
    except Exception as error:
        raise TypeError(
            f"`{cls.__name__}` cannot be subclassed, so its `forward` cannot be wrapped: {error}"
        ) from error

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = partial(cls.forward, self)
        layers: dict[str, Layer] = self.__dict__.get(_LAYERS, {})
        for role in ROLES:
            if role in layers:
                run = partial(_run_layer, layers[role], self, run)
        return run(*args, **kwargs)

    # After the class is made, not in its namespace: transformers wraps the `forward` it finds there with its own
    # checkpointing, and would then run it around ours.
    setattr(generated, "forward", forward)  # noqa: B010
    return generated


def _run_layer(layer: Layer, block: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return layer(block, run, args, kwargs)


def _reduce_plain(self: nn.Module, protocol: Any) -> Any:
    """Pickle as an object of the original class: the generated one cannot be imported, and needs this package."""
    generated = _generated_in_mro(type(self))
    assert generated is not None
    reduced = list(super(generated, self).__reduce_ex__(protocol))
    original = generated.__dict__[_GENERATED]
    reduced[1] = tuple(original if argument is generated else argument for argument in reduced[1])
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # which pickle refuses for another class
        reduced[0] = object.__new__
    if len(reduced) > 2 and isinstance(reduced[2], dict):  # the state
        reduced[2] = {name: value for name, value in reduced[2].items() if name != _LAYERS}
    return tuple(reduced)


def _deepcopy_wrapped(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy as an object of the original class, then with its own copies of the layers."""
    make, arguments, *state = _reduce_plain(self, 4)
    copied: nn.Module = make(*copy.deepcopy(arguments, memo))
    memo[id(self)] = copied
    if state and state[0] is not None:
        copied.__setstate__(copy.deepcopy(state[0], memo))  # type: ignore[no-untyped-call]
    layers = self.__dict__.get(_LAYERS)
    if layers:
        copied.__class__ = type(self)
        copied.__dict__[_LAYERS] = copy.deepcopy(layers, memo)
    return copied
