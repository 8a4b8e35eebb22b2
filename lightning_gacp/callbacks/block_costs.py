"""What the blocks of a model would keep, and compute, without recomputation and offload: counted from one real call.

A block is run once on fake tensors (shapes without values): that takes no memory and no time on the device, draws no
random numbers and changes no statistics. Works for any block whose arguments are tensors and plain values; for others
the costs are left unknown, and the table says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from lightning_gacp.blocks import Block
from lightning_gacp.wrapping import ROLES, unwrap

_PLAIN = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


class BlockCost(NamedTuple):
    """What one block costs for one micro-batch.

    Attributes:
        saved_bytes: Bytes that autograd saves inside the block, without parameters and without the block's inputs and
            outputs (an output that is saved is the input of what comes next, which holds it in any case).
        input_bytes: Bytes of the tensors that the block is called with.
        flops: Floating-point operations of its forward.
    """

    saved_bytes: int
    input_bytes: int
    flops: int


class BlockCosts:
    """Learns the costs of blocks from the first call of one of each kind (class and parameter shapes).

    Args:
        blocks: The blocks to learn about.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._kind_of = {block.name: _kind(block.module) for block in blocks}
        self._costs: dict[Any, BlockCost | None] = {}
        self._handles = []
        for kind, block in {_kind(block.module): block for block in reversed(blocks)}.items():
            self._handles.append(block.module.register_forward_pre_hook(self._learn(kind), with_kwargs=True))

    def _learn(self, kind: Any) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kind not in self._costs and torch.is_grad_enabled():
                self._costs[kind] = measure(module, args, kwargs)

        return hook

    def close(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def of(self, names: Iterable[str]) -> BlockCost | None:
        """Return the sum over the blocks of these names; ``None`` where one is unknown."""
        costs = [self._costs.get(self._kind_of.get(name)) for name in names]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            return None
        return BlockCost(*(sum(values) for values in zip(*known, strict=True))) if known else BlockCost(0, 0, 0)


def _kind(module: nn.Module) -> Any:
    return type(module), tuple(tuple(parameter.shape) for parameter in module.parameters())


def measure(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCost | None:
    """Run ``block`` on fake copies of its parameters and arguments; the block itself is not touched.

    Returns:
        Its costs, or ``None`` where it cannot be run like that.
    """
    leaves, _ = tree_flatten((args, kwargs))
    if any(not isinstance(leaf, _PLAIN) or (isinstance(leaf, Tensor) and type(leaf) is not Tensor) for leaf in leaves):
        return None  # an opaque argument, such as a cache, could be written to
    try:
        mode = FakeTensorMode()
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        copy = _skeleton(block, fake)
        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        inputs = {_storage(fake(leaf)): _bytes(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        known = {_storage(tensor) for tensor in made.values()}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            if _storage(tensor) not in known:
                saved.setdefault(_storage(tensor), tensor)
            return tensor

        counter = FlopCounterMode(display=False)
        with mode, counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = copy(*args, **kwargs)
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor):
                saved.pop(_storage(leaf), None)
        total = sum(_bytes(tensor) for tensor in saved.values())
        return BlockCost(total, sum(inputs.values()), counter.get_total_flops())
    except Exception:
        # Whatever a block does that fake tensors cannot follow: this is an estimate, and no reason to stop a fit.
        return None


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _skeleton(module: nn.Module, fake: Any) -> nn.Module:
    """Return a module like ``module`` with fake parameters and buffers, without its hooks and without our layers."""
    copy: nn.Module = object.__new__(type(module))
    state = {name: dict(value) if type(value) is dict else value for name, value in module.__dict__.items()}
    for name, value in state.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            state[name] = OrderedDict()
    state["_parameters"] = {
        name: None if p is None else nn.Parameter(fake(p), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    state["_buffers"] = {name: None if b is None else fake(b) for name, b in module._buffers.items()}
    state["_modules"] = {name: None if m is None else _skeleton(m, fake) for name, m in module._modules.items()}
    copy.__dict__.update(state)
    for role in ROLES:
        unwrap(copy, role)
    return copy
