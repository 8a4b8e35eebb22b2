"""Bytes that autograd saves for one micro-batch of the example model, measured and predicted from shapes.

    python benchmarks/saved_bytes.py

Measured: every tensor that passes the saved-tensor hooks during one forward, each storage once, parameters left out
(they are there anyway). Predicted: counted by hand from the shapes, below. On the CPU the two are equal to the byte.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_gacp as gacp

MIB = 1 << 20
FLOAT = 4  # bytes
INDEX = 8  # bytes


def load_example(name: str) -> Any:
    """Import ``examples/<name>.py``, which is a script and not part of a package."""
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def saved_bytes(run: Callable[[], Tensor], leave_out: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages that autograd saves during ``run``.

    Args:
        run: A forward that returns the loss.
        leave_out: Tensors whose storages are not counted (parameters).
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in leave_out}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Detached: a node that holds its own output would never be freed. Held: no other storage gets this address.
        tensor = tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        if pointer and pointer not in known:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return total


def block_bytes(batch: int, time: int, width: int, heads: int) -> int:
    """Predict what one block of the example saves, its input included, in bytes (float32, CPU attention).

    In units of ``batch * time * width`` floats: the input (1), the output of the first norm (1), queries, keys and
    values (3), the attention's output (1), the input of the second norm (1) and its output (1), and the two sides of
    the activation function (4 + 4): 16. To that come mean and deviation of both norms and the attention's log-sum-exp.
    """
    rows = batch * time
    return FLOAT * (16 * rows * width + 4 * rows + heads * rows)


def ends_bytes(batch: int, time: int, width: int, classes: int) -> int:
    """Predict what the example saves outside its blocks: embeddings' indices, last norm, head and loss, in bytes."""
    rows = batch * time
    indices = INDEX * (rows + time)  # tokens, positions
    norm = FLOAT * (2 * rows * width + 2 * rows)  # input, output, mean and deviation
    loss = FLOAT * rows * classes + INDEX * rows + FLOAT  # log-probabilities, labels, and the sum of the weights
    return indices + norm + loss


def predict(batch: int, time: int, width: int, heads: int, depth: int, classes: int, every_n_layers: int | None) -> int:
    """Predict the bytes of one micro-batch; a recomputed block keeps its input and nothing else.

    Args:
        batch: Sequences.
        time: Tokens a sequence.
        width: Size of the hidden state.
        heads: Attention heads.
        depth: Blocks.
        classes: Logits a token.
        every_n_layers: As in `checkpoint_blocks`; ``None`` recomputes no block.
    """
    recomputed = 0 if every_n_layers is None else len(range(0, depth, every_n_layers))
    kept_input = FLOAT * batch * time * width
    blocks = (depth - recomputed) * block_bytes(batch, time, width, heads) + recomputed * kept_input
    return blocks + ends_bytes(batch, time, width, classes)


def measure(batch: int, time: int, width: int, heads: int, depth: int, every_n_layers: int | None) -> int:
    """Measure the bytes of one micro-batch of the example model; the arguments are those of `predict`."""
    example = load_example("train_lm")
    torch.manual_seed(0)
    module = example.LanguageModel(width=width, depth=depth, heads=heads, context=time)
    texts = [bytes(range(32, 32 + 90)) * (time // 90 + 1)] * batch
    data = example.collate([text[:time] for text in texts])
    applied = None if every_n_layers is None else gacp.checkpoint_blocks(module.model, every_n_layers=every_n_layers)
    try:
        parameters: list[nn.Parameter] = list(module.parameters())
        return saved_bytes(lambda: module.training_step(data, 0), parameters)
    finally:
        if applied is not None:
            applied.remove()


def main() -> None:
    """Print the table."""
    batch, time, width, heads, depth = 4, 256, 64, 4, 8
    print(f"saved by autograd in one forward: {batch} x {time} tokens, width {width}, {depth} blocks, float32")
    print(f"{'recomputed':<22} {'measured MiB':>13} {'predicted MiB':>14} {'difference':>11} {'of full':>8}")
    full = measure(batch, time, width, heads, depth, None)
    for every_n_layers in (None, 4, 2, 1):
        measured = measure(batch, time, width, heads, depth, every_n_layers)
        predicted = predict(batch, time, width, heads, depth, 256, every_n_layers)
        name = "no block" if every_n_layers is None else f"every_n_layers={every_n_layers}"
        gap = f"{measured - predicted} B"
        print(f"{name:<22} {measured / MIB:>13.2f} {predicted / MIB:>14.2f} {gap:>11} {measured / full:>8.1%}")


if __name__ == "__main__":
    main()
