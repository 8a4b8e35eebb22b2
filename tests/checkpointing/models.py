"""Small models for these tests, and ways to compare a run with and without checkpointing."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from lightning_gacp.checkpointing import checkpoint_blocks


class MLPBlock(nn.Module):
    """A residual block whose saved tensors can be counted by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class AttentionBlock(nn.Module):
    """A transformer block that takes its mask by keyword, with dropout."""

    def __init__(self, width: int, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = MLPBlock(width)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch, length, width)
        return self.mlp(x + F.dropout(self.out(mixed), self.dropout, self.training))


class LM(nn.Module):
    """A language model over a stack of blocks, called with tokens and giving the mean loss."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of distinct storages that autograd saves, leaving out parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self.storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def saved_bytes(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that autograd keeps between the forward and the backward of one call."""
    with SavedBytes(module) as saved:
        kept_alive = module(*args, **kwargs)  # so that no storage is given out twice
    del kept_alive
    return saved.total


def train(
    module: nn.Module, batches: list[Any], loss: Callable[[nn.Module, Any], torch.Tensor] = lambda m, b: m(b)
) -> dict[str, torch.Tensor]:
    """Take one step on each batch. Returns all gradients and the state of the module after it."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    result: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        result[f"loss {step}"] = value.detach().clone()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                result[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    result.update({f"state {name}": value.clone() for name, value in module.state_dict().items()})
    result["next random number"] = torch.rand(1)
    return result


def assert_same_training(
    module: nn.Module,
    batches: list[Any],
    loss: Callable[[nn.Module, Any], torch.Tensor] = lambda m, b: m(b),
    **settings: Any,
) -> None:
    """A copy of ``module`` that is checkpointed trains bit for bit as ``module`` does."""
    checkpointed = copy.deepcopy(module)
    with checkpoint_blocks(checkpointed, **settings):
        found = train(checkpointed, batches, loss)
    assert_equal(found, train(module, batches, loss))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert different == []


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are alive, whoever holds them.

    Unlike saved-tensor hooks it also sees what a checkpoint keeps in a closure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in pytree.tree_leaves((args, kwargs)) if _is_plain(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if _is_plain(leaf) and id(leaf.untyped_storage()) not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
