"""What a recomputation must find as the forward found it: buffers and attributes that it changed, weights, modes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import _disable_current_modes

# Up to this many bytes, keeping a copy of a running statistic costs less than finding out whether it is needed.
_SMALL = 1 << 16
# Another buffer that kept its value through this many calls is from then on watched by identity and version alone.
_LEARNING_CALLS = 2
_CHANGES = -1
# Attributes of a user's module that a forward may move on: counters, temperatures, switches, running values.
_PLAIN = frozenset({int, float, bool, str, type(None)})
_WATCHED = _PLAIN | {torch.Tensor, torch.Generator}
_MISSING = object()


class _Buffer(NamedTuple):
    """A buffer before a call, and a copy of its value. Both are ``None`` where nothing was registered yet."""

    place: tuple[int, str]
    holder: dict[str, Any]
    name: str
    before: torch.Tensor | None
    version: int
    copy: torch.Tensor | None

    def rebind(self, value: torch.Tensor | None) -> None:
        self.holder[self.name] = value


class BufferHabits:
    """Which of a block's tables its forward changes, learned from the first calls. One object for each block.

    Small floating-point buffers and counters are taken to change always: batch norm, unfrozen late, would be missed,
    since it leaves the versions of its statistics alone. Masks, indices and whatever is large are learned.
    """

    def __init__(self) -> None:
        self._quiet_calls: dict[tuple[int, str], int] = {}

    def need_copy(self, buffer: _Buffer) -> bool:
        """After a call, whether a recomputation needs the copy of this buffer."""
        calls = self._quiet_calls.get(buffer.place, 0)
        if buffer.before is None or buffer.copy is None or calls == _CHANGES or _is_statistic(buffer.copy):
            return True
        after = buffer.holder.get(buffer.name)
        quiet = after is buffer.before and _version(after) == buffer.version
        if quiet and calls < _LEARNING_CALLS:
            quiet = torch.equal(buffer.before, buffer.copy)  # writes through `.data` do not show in the version
        self._quiet_calls[buffer.place] = calls + 1 if quiet else _CHANGES
        return not quiet


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, which share memory with one another where the originals do."""
    storages: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    copies = [tensor.detach().clone() for tensor in tensors]
    for places in storages.values():
        storage = tensors[places[0]].untyped_storage()
        # Small parts of a large storage are parts of something else, and do not overlap.
        if len(places) > 1 and storage.nbytes() <= 4 * sum(tensors[place].nbytes for place in places):
            shared = storage.clone()  # type: ignore[no-untyped-call]
            for place in places:
                like = tensors[place]
                empty = torch.empty(0, dtype=like.dtype, device=like.device)
                copies[place] = empty.set_(shared, like.storage_offset(), like.shape, like.stride())
    return copies


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors made in inference mode count no versions


def _is_statistic(buffer: torch.Tensor) -> bool:
    return buffer.nbytes <= _SMALL and (buffer.is_floating_point() or buffer.dim() == 0)


def _put(holder: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not _MISSING:
            holder[name] = value
        elif name in holder:
            del holder[name]


@cache
def _is_users(python_module: str) -> bool:
    """Whether the modules of a class may have attributes that their forward changes; torch's own have none."""
    return not python_module.startswith("torch.nn.")


def _modules_of(block: nn.Module) -> list[nn.Module]:
    """The block and all modules inside, each once. (`named_modules` takes several times as long.)"""
    found = [block]
    seen = {block}
    for module in found:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def is_traceable(block: nn.Module) -> bool:
    """Whether a compiler that sees through a checkpoint recomputes ``block`` right.

    It recomputes with buffers as the forward has left them, so it must not see those that a forward may change. The
    output of a norm that is trained does not depend on its statistics, and tables of integers are no state.
    """
    for module in _modules_of(block):
        if isinstance(module, _NormBase):
            continue
        watched = module.__dict__.values() if _is_users(module.__class__.__module__) else ()
        attributes = [value for value in watched if type(value) is torch.Tensor]
        for buffer in [*module._buffers.values(), *attributes]:
            if buffer is None or buffer.is_floating_point() or buffer.is_complex() or buffer.dim() == 0:
                return False
    return True


class StateBefore:
    """The state of a block before one call of its forward.

    Buffers are kept as copies, and so are small tensors that are plain attributes, because the forward may change them
    in place, through ``.data`` or by assignment, and a later call, whose graph may be alive at the same time, changes
    them again. Numbers and switches that are attributes are kept too, and weights by identity and version.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.has_inner_hooks = False
        """Whether forward hooks on modules inside the block expect to see the end of each forward."""
        self.is_lazy = False
        """Whether the call will make parameters or buffers whose shapes are not known yet."""
        self._modes: list[tuple[nn.Module, bool]] = []
        self._weights: list[tuple[nn.Module, Mapping[str, Any], str, torch.Tensor, int, bool]] = []
        self._buffers: list[_Buffer] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        for place, module in enumerate(_modules_of(block)):
            self._modes.append((module, module.training))
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                self.is_lazy = True
                return
            if place and module._forward_hooks:
                self.has_inner_hooks = True
            # FSDP replaces weights by their shards and back, and takes care of their values itself.
            if "_is_fsdp_managed_module" not in module.__dict__:  # faster than asking the module, which would search
                for name, weight in module._parameters.items():
                    if weight is not None:
                        self._weights.append(
                            (module, module._parameters, name, weight, _version(weight), weight.requires_grad)
                        )
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.requires_grad:  # as a weight: its graph must lead to the same tensor
                    self._weights.append((module, module._buffers, name, buffer, _version(buffer), True))
                else:
                    self._keep_buffer(place, module._buffers, name, buffer)
            if _is_users(module.__class__.__module__):
                self._keep_attributes(place, module.__dict__)

        if self._buffers:
            self._copy_buffers()

    def _keep_buffer(self, place: int, holder: dict[str, Any], name: str, buffer: torch.Tensor | None) -> None:
        version = 0 if buffer is None else _version(buffer)
        self._buffers.append(_Buffer((place, name), holder, name, buffer, version, None))

    def _copy_buffers(self) -> None:
        copies = iter(_copied([buffer.before for buffer in self._buffers if buffer.before is not None]))
        self._buffers = [
            buffer if buffer.before is None else buffer._replace(copy=next(copies)) for buffer in self._buffers
        ]

    def _keep_attributes(self, place: int, attributes: dict[str, Any]) -> None:
        watched = {name: value for name, value in attributes.items() if type(value) in _WATCHED}
        for name, value in tuple(watched.items()):
            if type(value) in _PLAIN:
                continue
            del watched[name]
            if isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif value.grad_fn is None and not value.requires_grad and value.nbytes <= _SMALL:
                self._keep_buffer(place, attributes, name, value)  # a running value that is not registered as one
        self._attributes.append((attributes, watched, tuple(attributes)))

    def forget_unchanged(self, habits: BufferHabits) -> None:
        """After the forward, keep only the copies that a recomputation needs."""
        self._buffers = [buffer._replace(before=None) for buffer in self._buffers if habits.need_copy(buffer)]
        for holder, kept, names in self._attributes:
            if len(holder) > len(names):  # the forward has made attributes, which the recomputation must not find
                made = holder.keys() - set(names)
                kept.update({name: _MISSING for name in made if type(holder[name]) in _WATCHED})

    def refuse_changed_weights(self, block_name: str) -> None:
        """Raise what autograd raises when a weight is not the one that the forward has used.

        Raises:
            RuntimeError: A weight was replaced or changed in place since.
        """
        for module, holder, name, weight, version, _ in self._weights:
            now = holder.get(name)
            if now is not weight or _version(weight) != version:
                path = next(path for path, part in self._block.named_modules() if part is module)
                full_name = ".".join(part for part in (block_name, path, name) if part)
                same = now is weight
                found = f"is at version {_version(weight)}; expected version {version}" if same else "was replaced"
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"the weight `{full_name}` {found}. Its block is checkpointed, so the backward pass recomputes the "
                    "forward with it. Run the backward pass before the optimizer step or whatever else changes it.",
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the block be as it was, and whatever it does to its buffers meanwhile be forgotten.

        That is, buffers and plain attributes have their values, modules are in training mode or not, and parameters
        require gradients or not, as before the forward: by the time of the backward, another may have switched these.
        """
        modes = [(module, module.training) for module, training in self._modes if module.training != training]
        trained = [(weight, not flag) for *_, weight, _, flag in self._weights if weight.requires_grad != flag]
        buffers = [(buffer, buffer.holder.get(buffer.name)) for buffer in self._buffers]
        attributes = [
            (holder, {name: holder.get(name, _MISSING) for name in kept}) for holder, kept, _ in self._attributes
        ]
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        copies: list[torch.Tensor | None] = []
        if buffers:
            # A second copy, since another recomputation may come. The modes of selective checkpointing must not see it.
            with _disable_current_modes():
                again = iter(_copied([buffer.copy for buffer in self._buffers if buffer.copy is not None]))
            copies = [None if buffer.copy is None else next(again) for buffer in self._buffers]
        try:
            for module, training in modes:
                module.training = not training
            for weight, flag in trained:
                weight.requires_grad = not flag
            for (buffer, _), copy in zip(buffers, copies, strict=True):
                buffer.rebind(copy)
            for holder, kept, _ in self._attributes:
                _put(holder, kept)
            for generator, state in self._generators:
                generator.set_state(state)
            yield
        finally:
            for generator, state in generators:
                generator.set_state(state)
            for holder, values in attributes:
                _put(holder, values)
            for module, training in modes:
                module.training = training
            for weight, flag in trained:
                weight.requires_grad = flag
            for buffer, value in buffers:
                buffer.rebind(value)
