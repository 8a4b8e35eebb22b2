"""A small token model with ragged batches, and the one-big-batch reference that knows nothing of Lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HIDDEN = 11, 8
IGNORE = -100


def ragged_batches(lengths: list[int], rows: int = 2, seed: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of ``rows`` samples; the i-th has ``lengths[i]`` targets (0 is possible), the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for length in lengths:
        width = max(-(-length // rows), 1)
        inputs = torch.randint(VOCABULARY, (rows, width), generator=generator)
        labels = torch.randint(VOCABULARY, (rows, width), generator=generator).flatten()
        labels[length:] = IGNORE
        batches.append({"inputs": inputs, "labels": labels.view(rows, width)})
    return batches


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY)
    ).to(dtype)


def loss_of(net: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    logits = net(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction=reduction)


def masked_mean(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean that is 0/0 = NaN, with NaN gradients, when nothing is left."""
    labels = batch["labels"]
    mask = (labels != IGNORE).to(next(net.parameters()).dtype)
    each = F.cross_entropy(net(batch["inputs"]).flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    return (each.view_as(mask) * mask).sum() / mask.sum()


def count(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)


def big_batch_gradients(net: nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Gradient of the mean over all targets of all batches together, in one graph."""
    total = sum(loss_of(net, batch, "sum") for batch in batches) / count(batches)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, list(net.parameters())))


class Automatic(LightningModule):
    """Records the gradient that each optimizer step sees."""

    def __init__(self, lr: float = 0.1, dtype: torch.dtype = torch.float32, loss: Any = loss_of) -> None:
        super().__init__()
        self.net = make_net(dtype)
        self.lr = lr
        self.loss = loss
        self.seen: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append([p.grad.clone() for p in self.net.parameters()])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Manual(Automatic):
    """The same, in manual optimization, written as for one batch at a time."""

    def __init__(self, *args: Any, trailing: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.trailing = trailing

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if not self.trailing:
            optimizer.zero_grad()
        loss = self.loss(self.net, batch)
        self.manual_backward(loss)
        optimizer.step()
        if self.trailing:
            optimizer.zero_grad()
        return loss


class BoringEitherWay(BoringModel):
    """Lightning's little model, in automatic optimization or by hand."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(output["loss"])
            optimizer.step()
        return output


def reference_run(
    batches: list[dict[str, Tensor]], cycle: int, epochs: int = 1, lr: float = 0.1, dtype: torch.dtype = torch.float32
):
    """Plain SGD over big batches; the gradients of every step and the final net."""
    net = make_net(dtype)
    gradients = []
    for _ in range(epochs):
        for start in range(0, len(batches), cycle):
            group = batches[start : start + cycle]
            if count(group) == 0:
                continue
            step = big_batch_gradients(net, group)
            gradients.append(step)
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), step, strict=True):
                    parameter -= lr * gradient
    return gradients, net


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    a, b = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (found, expected))
    return float((a - b).norm() / b.norm())


def quiet_trainer(**kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return Trainer(**{**defaults, **kwargs})


def loader(batches: list[Any]) -> torch.utils.data.DataLoader[Any]:
    """Yields the micro-batches as they are."""
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
