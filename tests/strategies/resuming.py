"""Loaders that can resume, modules with dropout-free state that matters, and runs that are cut and continued."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import IterableDataset

import lightning_gacp as gacp
from tests.strategies.models import loss_of, make_net, quiet_trainer, ragged_batches

LENGTHS = [5, 3, 0, 7, 2, 9, 4, 6, 1, 8, 3]
CYCLE = 4


class StatefulLoader:
    """Yields ``batches``, and goes on where the run that wrote the checkpoint stood."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.position = 0
        self._resumes = False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes:
            self.position = 0
        self._resumes = False
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self._resumes = self.position < len(self.batches)  # at the end of an epoch the next one begins


class UnsizedLoader(StatefulLoader):
    """The same, of unknown length."""

    __len__ = None  # type: ignore[assignment]


class Stream(IterableDataset[Any]):
    """Any batches, of unknown length, without state."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Learner(LightningModule):
    """AdamW and a schedule: both have state that a wrong resumption shows in."""

    def __init__(self, manual: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = make_net(dtype)
        self.automatic_optimization = not manual

    def loss(self, batch: Any) -> Tensor:
        return loss_of(self.net, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoPlayers(Learner):
    """As in a GAN: the second loss leaves gradients in the first optimizer's parameters."""

    def __init__(self, manual: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(True, dtype)
        self.other = make_net(dtype)
        with torch.no_grad():
            for parameter in self.other.parameters():
                parameter.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        first.step()
        second.zero_grad()
        self.manual_backward(loss_of(self.other, batch) + 0.3 * loss_of(self.net, batch))
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (self.net, self.other)]


class ToldLearner(Learner):
    """Divides by the items of the cycle itself: the look-ahead loader."""

    def training_step(self, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
        loss = loss_of(self.net, batch, "sum") / num_items_in_batch
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return None


class Cut(Exception):
    """Ends a run from inside, as a lost machine would."""


class SaveAndCut(Callback):
    """Saves at the end of micro-batch ``at`` (from 1, over all epochs), and raises."""

    def __init__(self, at: int, path: Path, hook: str = "on_train_batch_end") -> None:
        self.at, self.path, self.seen = at, path, 0
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen += 1
        if self.seen == self.at:
            trainer.save_checkpoint(self.path)
            raise Cut


class SaveOnException(Callback):
    """Lightning's ``OnExceptionCheckpoint``, without its rules for finding the file again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def strategy(**kwargs: Any) -> Any:
    return gacp.GACPStrategy(**{"accumulate_grad_batches": CYCLE, "num_items": "labels", **kwargs})


def train(
    module: LightningModule,
    data: Any,
    *callbacks: Callback,
    path: Path | None = None,
    using: Callable[[], Any] = strategy,
    **trainer: Any,
) -> Any:
    """Trains; with ``path`` from that checkpoint. A ``Cut`` ends it early."""
    made = quiet_trainer(strategy=using(), callbacks=list(callbacks), **{"max_epochs": 2, **trainer})
    try:
        made.fit(module, data, ckpt_path=path, weights_only=False if path else None)
    except Cut:
        module.cut = True  # type: ignore[assignment]
    return made


def state_of(module: LightningModule) -> list[Tensor]:
    """Weights and everything the optimizers know."""
    values = [tensor.detach().clone() for tensor in module.state_dict().values()]
    optimizers = module.optimizers()
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        for state in copy.deepcopy(optimizer.state_dict())["state"].values():
            values += [torch.as_tensor(value) for value in state.values()]
    return values


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def batches(seed: int = 0) -> list[dict[str, Tensor]]:
    return ragged_batches(LENGTHS, seed=seed)
