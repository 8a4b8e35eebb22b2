"""Error of the gradient of a cycle against one big batch, at initialisation, on the example's paragraphs.

    python benchmarks/accumulation_error.py

One big batch: the mean over all tokens of the cycle, in one forward and one backward, without a Trainer. Against it:
this package in automatic and in manual optimization, and Lightning's own ``Trainer(accumulate_grad_batches=...)``. The
learning rate is 0, so that every cycle starts from the same weights. The error is ``|g - g_big| / |g_big|`` over all
parameters together.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_gacp as gacp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_lm import LanguageModel, collate, paragraphs

Batch = dict[str, Tensor]


class Recorder(LanguageModel):
    """The example's model, which keeps the gradient of every optimizer step.

    Args:
        manual: Optimize by hand, as a module would that knows of no accumulation.
    """

    def __init__(self, manual: bool, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.automatic_optimization = not manual
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss; in manual optimization, also make the step."""
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradient that the optimizer is about to use."""
        self.gradients.append(flat_gradient(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def flat_gradient(module: torch.nn.Module) -> Tensor:
    """Return all gradients of ``module`` as one float64 vector."""
    return torch.cat([p.grad.detach().flatten().double() for p in module.parameters() if p.grad is not None])


def micro_batches(number: int, size: int, context: int, seed: int = 0) -> list[Batch]:
    """Draw ``number`` micro-batches of ``size`` paragraphs each."""
    texts = paragraphs(context)
    random.Random(seed).shuffle(texts)
    return [collate(texts[start : start + size]) for start in range(0, number * size, size)]


def big_batch_gradient(module: LanguageModel, cycle: list[Batch]) -> Tensor:
    """Return the gradient of the mean over all tokens of ``cycle``, from one forward and one backward."""
    longest = max(batch["ids"].shape[1] for batch in cycle)

    def joined(key: str, fill: int) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(batch[key], (0, longest - batch[key].shape[1]), value=fill) for batch in cycle])

    module.zero_grad()
    module.loss(module.model(joined("ids", 0)), joined("labels", -100)).backward()
    gradient = flat_gradient(module)
    module.zero_grad()
    return gradient


def recorded_gradients(data: list[Batch], cycle: int, ours: bool, manual: bool, **sizes: Any) -> list[Tensor]:
    """Train for one epoch over ``data`` and return the gradient of each optimizer step.

    Args:
        data: The micro-batches, in order.
        cycle: Micro-batches in a cycle.
        ours: This package's strategy; else Lightning's own accumulation.
        manual: Manual optimization.
        sizes: Arguments of the model.
    """
    torch.manual_seed(0)
    module = Recorder(manual, **sizes)
    if ours:
        how: dict[str, Any] = {"strategy": gacp.GACPStrategy(accumulate_grad_batches=cycle, num_items="labels")}
    else:
        how = {"accumulate_grad_batches": cycle}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.gradients


def errors(data: list[Batch], cycle: int, ours: bool, manual: bool, **sizes: Any) -> list[float]:
    """Return the relative error of each step's gradient; see the top of this file."""
    torch.manual_seed(0)
    reference = LanguageModel(**sizes)
    cycles = [data[start : start + cycle] for start in range(0, len(data), cycle)]
    gradients = recorded_gradients(data, cycle, ours, manual, **sizes)
    assert len(gradients) == len(cycles), (len(gradients), len(cycles))
    result = []
    for gradient, batches in zip(gradients, cycles, strict=True):
        expected = big_batch_gradient(reference, batches)
        result.append(float((gradient - expected).norm() / expected.norm()))
    return result


def main() -> None:
    """Print the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sizes = {"width": 64, "depth": 8, "heads": 4, "context": 256}
    print("relative error of the gradient, float32: largest of the full cycles / the short cycle at the end")
    print(f"{'paragraphs':<12}{'micro-batches':<15}{'ours, automatic':<20}{'ours, manual':<20}{'Lightning':<20}")
    for paragraphs_each in (4, 1):
        for cycle in (1, 2, 3, 7):
            short = 0 if cycle == 1 else 1
            data = micro_batches(14 // cycle * cycle + short, paragraphs_each, 256)
            cells = []
            for ours, manual in ((True, False), (True, True), (False, False)):
                found = errors(data, cycle, ours, manual, **sizes)
                full, rest = found[: len(data) // cycle], found[len(data) // cycle :]
                cells.append(f"{max(full):.1e} / " + (f"{rest[0]:.1e}" if rest else "-"))
            print(f"{paragraphs_each:<12}{cycle:<15}" + "".join(f"{cell:<20}" for cell in cells))


if __name__ == "__main__":
    main()
