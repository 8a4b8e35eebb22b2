"""Error of gradients accumulated over 64 micro-batches under ``bf16-true``, and what ``grad_dtype=float32`` removes.

    python benchmarks/grad_dtype.py

The weights are bfloat16 and stay as they are (learning rate 0). The reference adds the very same bfloat16 gradients of
the micro-batches up in float64: what is left is the error of accumulation alone. ``|g - g_ref| / |g_ref|``, before the
gradient is cast for the optimizer.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_gacp as gacp

MICRO_BATCHES = 64


class Net(L.LightningModule):
    """A small network that keeps the gradient of its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        self.gradient: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy, a mean over samples."""
        return torch.nn.functional.cross_entropy(self.net(batch[0].to(self.dtype)).float(), batch[1])

    def on_after_backward(self) -> None:
        """Keep what has been gathered."""
        self.gradient = flat(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def flat(module: torch.nn.Module) -> Tensor:
    """All gradients as one float64 vector."""
    return torch.cat([p.grad.detach().double().flatten() for p in module.parameters() if p.grad is not None])


def make_batches() -> list[Any]:
    """Micro-batches of 8 samples each."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 32, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]


def accumulated(grad_dtype: str | None) -> Tensor:
    """The gradient of a cycle of 64 micro-batches."""
    module = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=gacp.GACPStrategy(accumulate_grad_batches=MICRO_BATCHES, grad_dtype=grad_dtype),
    )
    trainer.fit(module, DataLoader(make_batches(), batch_size=None))  # type: ignore[arg-type]
    assert module.gradient is not None
    return module.gradient


def reference() -> Tensor:
    """The micro-batches' bfloat16 gradients, added up in float64."""
    module = Net().to(torch.bfloat16)
    total = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    for batch in make_batches():
        module.zero_grad()
        module.training_step(batch, 0).backward()  # type: ignore[no-untyped-call]
        total += flat(module) / MICRO_BATCHES
    return total


def errors() -> dict[str, float]:
    """Relative errors, by the dtype of accumulation."""
    expected = reference()
    found = {"bfloat16": accumulated(None), "float32": accumulated("float32")}
    return {name: float((gradient - expected).norm() / expected.norm()) for name, gradient in found.items()}


def main() -> None:
    """Print both errors."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"relative error of a gradient accumulated over {MICRO_BATCHES} micro-batches, weights in bfloat16")
    for name, error in errors().items():
        print(f"accumulated in {name:<10} {error:.1e}")


if __name__ == "__main__":
    main()
