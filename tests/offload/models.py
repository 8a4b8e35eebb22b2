"""Small models of the kinds that offload has to cope with. Each has its blocks in ``blocks``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


class TransformerBlock(nn.Module):
    """Attention with a shared mask and a gated MLP. ``cross`` are the states of an encoder."""

    def __init__(self, cross: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH) if cross else None
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, states: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, dim=-1)
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        x = x + self.dropout(self.out(weights @ v))
        if self.cross is not None and states is not None:
            x = x + (x @ states.transpose(-1, -2)).softmax(-1) @ self.cross(states)
        return x + self.down(functional.silu(self.up(x)) * torch.sigmoid(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -1e9, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


class EncoderDecoder(nn.Module):
    """The states of the encoder go to every decoder block; both stacks share the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.decoder = nn.ModuleList(TransformerBlock(cross=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        states, x = self.embed(tokens), self.embed(tokens.flip(1))
        mask = torch.zeros(tokens.shape[1], tokens.shape[1], device=tokens.device)
        for block in self.encoder:
            states = block(states, mask)
        for block in self.decoder:
            x = block(x, mask, states)
        return x


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.conv(x)))


class Convolutions(nn.Module):
    """In channels-last, so what is saved is dense but not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 1)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        image = tokens[:, None, :, None].float().expand(-1, -1, -1, 3).contiguous(memory_format=torch.channels_last)
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return x


class Adapter(nn.Module):
    """A frozen linear map with a trainable one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class LoRA(nn.Module):
    """The embedding is frozen too: the input of the first block needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    """Each token goes to one of three experts, so in a small batch some see nothing; and one result is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            at = (choice == index).nonzero().squeeze(-1)
            result = result.index_add(0, at, expert(flat[at]) * gate[at, None])
        self.unused = torch.tanh(flat * 2)  # a graph of its own, replaced in the next call
        return x + result.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Branches(nn.Module):
    """Two stacks side by side: their backward does not run in the reverse of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.left = nn.ModuleList(Adapter() for _ in range(2))
        self.right = nn.ModuleList(Adapter() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        left = right = self.embed(tokens)
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        return left * right


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "transformer": (Transformer, ["blocks.*"]),
    "convolution": (Convolutions, ["blocks.*"]),
    "encoder-decoder": (EncoderDecoder, ["encoder.*", "decoder.*"]),
    "LoRA": (LoRA, ["blocks.*"]),
    "mixture of experts": (MixtureOfExperts, ["blocks.*"]),
    "branches": (Branches, ["left.*", "right.*"]),
}
"""By name: what makes the model, and which of its modules are blocks."""


def build(name: str) -> nn.Module:
    """The model, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MODELS[name][0]()


def batch(step: int = 0, length: int = 5) -> Tensor:
    """Tokens for any of the models."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (2, length), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    """Whether two sets of gradients are equal bit for bit."""
    return one.keys() == other.keys() and all(
        (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b)))
        for a, b in ((one[name], other[name]) for name in one)
    )
