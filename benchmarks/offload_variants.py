"""The model of `offload.py`, and what is put around it: nothing, ours, torch's own, and that of other packages."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Context = Callable[["Model"], "contextlib.AbstractContextManager[Any]"]


class TransformerLayer(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 128)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on ``[batch, sequence, hidden]``."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Layers in a row. ``around`` is what is put around the call of each, ``during`` what is active meanwhile."""

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(TransformerLayer(hidden) for _ in range(depth))
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
        self.during_forward = self.during_step = contextlib.nullcontext[Any]()

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers; a scalar."""
        with self.during_forward:
            for layer in self.layers:
                x = self.around(layer, x)
        return x.float().square().mean()

    def step(self, x: Tensor) -> None:
        """Run forward and backward."""
        with self.during_step:
            self(x).backward()


@contextlib.contextmanager
def nothing(model: Model) -> Iterator[None]:
    """Plain."""
    yield


@contextlib.contextmanager
def recomputed(model: Model, offload: bool = False) -> Iterator[None]:
    """Ours: recomputation, with or without offload of the inputs."""
    from lightning_gacp.checkpointing import checkpoint_blocks

    with checkpoint_blocks(model, blocks=TransformerLayer, offload=offload):
        yield


@contextlib.contextmanager
def everything(model: Model, fraction: float) -> Iterator[None]:
    """Ours: what the blocks save."""
    from lightning_gacp.offload import offload_blocks

    with offload_blocks(model, TransformerLayer, fraction=fraction):
        yield


@contextlib.contextmanager
def saved_on_cpu(model: Model, recompute: bool) -> Iterator[None]:
    """torch's hooks around each layer, or around the checkpoint of each."""

    def around(layer: nn.Module, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=True):
            return checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)

    model.around = around
    try:
        yield
    finally:
        model.around = lambda layer, x: layer(x)


@contextlib.contextmanager
def of_torchtune(model: Model) -> Iterator[None]:
    """torchtune's, around each forward, as in its recipes."""
    offloading = torchtune_offloading().OffloadActivations()
    model.around, model.during_forward = lambda layer, x: checkpoint(layer, x, use_reentrant=False), offloading
    try:
        yield
    finally:
        model.around, model.during_forward = lambda layer, x: layer(x), contextlib.nullcontext()


@contextlib.contextmanager
def of_trl(model: Model) -> Iterator[None]:
    """TRL's, around each step, as in its trainers."""
    from accelerate import PartialState
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    PartialState()  # else its warning about memory of the host is an error
    offloading = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    model.around, model.during_step = lambda layer, x: checkpoint(layer, x, use_reentrant=False), offloading
    try:
        yield
    finally:
        model.around, model.during_step = lambda layer, x: layer(x), contextlib.nullcontext()


def torchtune_offloading() -> ModuleType:
    """The file of torchtune's `OffloadActivations`, by itself.

    The package cannot be imported beside today's torch: its last release needs parts of torchao that are gone. What the
    file takes from elsewhere does not matter here: a logger, and two classes that nothing in this model is of.
    """
    found = importlib.util.find_spec("torchtune")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torchtune", name="torchtune")
    path = Path(found.submodule_search_locations[0], "training", "_activation_offloading.py")
    spec = importlib.util.spec_from_file_location("torchtune_offloading", path)
    assert spec is not None and spec.loader is not None
    stand_ins = {
        "torchao": {"__version__": "0.12.0"},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": logging.getLogger},
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    module = importlib.util.module_from_spec(spec)
    try:
        for name, contents in stand_ins.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        spec.loader.exec_module(module)
    finally:
        for name, original in before.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original
    return module


VARIANTS: dict[str, Context] = {
    "checkpoint": recomputed,
    "inputs, ours": lambda model: recomputed(model, offload=True),
    "inputs, save_on_cpu (Hugging Face)": lambda model: saved_on_cpu(model, recompute=True),
    "inputs, torchtune": of_torchtune,
    "inputs, TRL": of_trl,
    "nothing": nothing,
    "all, ours, fraction 0.5": lambda model: everything(model, 0.5),
    "all, ours": lambda model: everything(model, 1.0),
    "all, save_on_cpu": lambda model: saved_on_cpu(model, recompute=False),
}
"""Each after what it is measured against."""
AGAINST = {variant: "nothing" if variant.startswith("all") else "checkpoint" for variant in VARIANTS if "," in variant}
