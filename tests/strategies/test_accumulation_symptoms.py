"""Symptoms of accumulation that others have reported, each named after what was seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_gacp import GACPStrategy
from tests.strategies.models import (
    IGNORE,
    VOCABULARY,
    Automatic,
    Manual,
    count,
    loader,
    loss_of,
    make_net,
    masked_mean,
    quiet_trainer,
    ragged_batches,
    reference_run,
    relative_error,
)

LENGTHS = [6, 2, 9, 4, 1, 7, 3, 5, 8, 2]
CYCLE = 4
BOTH = [Automatic, Manual]


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One big batch: the model takes each token alone."""
    return {key: torch.cat([batch[key].flatten() for batch in batches])[None] for key in batches[0]}


# ---------------------------------------------------------------- what a loss may be a mean over

CLASS_WEIGHTS = torch.linspace(0.2, 3.0, VOCABULARY, dtype=torch.float64)


def smoothed(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = net(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=0.3)


def weighted(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = net(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, weight=CLASS_WEIGHTS, ignore_index=IGNORE)


def weight_of_targets(batch: dict[str, Tensor]) -> Tensor:
    return CLASS_WEIGHTS[batch["labels"][batch["labels"] != IGNORE]].sum()


def penalised(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(net, batch) + 0.05 * sum(parameter.square().sum() for parameter in net.parameters())


def boxes(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A sum over what is found, divided by how many there are; none is also possible."""
    found = batch["labels"] > 4
    return F.smooth_l1_loss(net(batch["inputs"])[found].sum(-1), batch["labels"][found].double(), reduction="mean")


def number_of_boxes(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] > 4).sum())


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("loss", "num_items"),
    [(smoothed, "labels"), (weighted, weight_of_targets), (penalised, "labels"), (boxes, number_of_boxes)],
    ids=["label smoothing", "class weights", "a penalty that no item has a part in", "boxes"],
)
def test_losses_with_a_denominator_of_their_own(loss: Any, num_items: Any, cls: type[Automatic]) -> None:
    """transformers 46731, 48690; trl 6083; rf-detr 1117: too large by the number of micro-batches, or of ranks."""
    batches = ragged_batches(LENGTHS)
    module = cls(lr=0.0, dtype=torch.float64, loss=loss)
    quiet_trainer(strategy=GACPStrategy(CYCLE, num_items=num_items)).fit(module, loader(batches))
    assert len(module.seen) == 3
    net = make_net(torch.float64)
    for start, found in zip(range(0, len(batches), CYCLE), module.seen, strict=True):
        whole = loss(net, joined(batches[start : start + CYCLE]))
        assert relative_error(found, list(torch.autograd.grad(whole, list(net.parameters())))) < 1e-12


# ---------------------------------------------------------------- a batch that the module cuts itself


class Cuts(Manual):
    """Runs a backward for each row of a batch; ``trailing`` or not, the step is one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if not self.trailing:
            optimizer.zero_grad()
        for row in range(len(batch["labels"])):
            part = {key: value[row : row + 1] for key, value in batch.items()}
            if count([part]):
                self.manual_backward(self.loss(self.net, part) * (count([part]) / count([batch])))
        optimizer.step()
        if self.trailing:
            optimizer.zero_grad()


@pytest.mark.parametrize("trailing", [False, True])
def test_a_batch_cut_inside_the_step_is_one_micro_batch(trailing: bool) -> None:
    """accelerate 1847, 3017: each part of the loader's last batch made a step of its own."""
    batches = ragged_batches(LENGTHS)
    module = Cuts(dtype=torch.float64, trailing=trailing)
    trainer = quiet_trainer(strategy=GACPStrategy(CYCLE, num_items="labels"), max_epochs=2)
    trainer.fit(module, loader(batches))
    expected, net = reference_run(batches, CYCLE, epochs=2, dtype=torch.float64)
    assert trainer.global_step == len(module.seen) == len(expected)
    assert relative_error(list(module.net.parameters()), list(net.parameters())) < 1e-12


# ---------------------------------------------------------------- a stream without an end


class ToldTotal(Automatic):
    def training_step(self, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
        return loss_of(self.net, batch, "sum") / num_items_in_batch


@pytest.mark.parametrize("cls", [*BOTH, ToldTotal])
def test_an_endless_stream_ends_with_max_steps(cls: type[Automatic]) -> None:
    """transformers 8859, 26541: training on a stream never ended, or stopped short. Looking ahead reads one cycle."""
    batches = ragged_batches(LENGTHS)
    fetched: list[Any] = []

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in itertools.cycle(batches):
                fetched.append(batch)
                yield batch

    module = cls(dtype=torch.float64)
    data: Any = DataLoader(Endless(), batch_size=None)
    trainer = quiet_trainer(strategy=GACPStrategy(CYCLE, num_items="labels"), max_epochs=-1, max_steps=3)
    trainer.fit(module, data)
    assert trainer.global_step == len(module.seen) == 3
    for found, wanted in zip(
        module.seen, reference_run((batches * 2)[:12], CYCLE, dtype=torch.float64)[0], strict=True
    ):
        assert relative_error(found, wanted) < 1e-12
    assert 12 <= len(fetched) <= 12 + 1 + CYCLE  # Lightning fetches one more where the length is not known


# ---------------------------------------------------------------- memory and speed


class Silent(Manual):
    """Returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [*BOTH, Silent])
def test_no_graph_outlives_its_micro_batch(cls: type[Automatic]) -> None:
    """torchtune 1917: the graphs of a whole cycle were alive at its end."""
    kept: list[StorageWeakRef] = []
    alive: list[int] = []

    def watched(net: Any, batch: Any) -> Tensor:
        alive.append(sum(not storage.expired() for storage in kept))

        def noted(inputs: Tensor) -> Tensor:
            hidden = net[:3](inputs)  # which both layers around it keep for their backwards
            kept.append(StorageWeakRef(hidden.untyped_storage()))
            return net[3](hidden)

        return loss_of(noted, batch)  # type: ignore[arg-type]

    strategy = GACPStrategy(CYCLE, num_items="labels")
    quiet_trainer(strategy=strategy).fit(cls(loss=watched), loader(ragged_batches(LENGTHS)))
    assert alive == [0] * len(LENGTHS)


@pytest.mark.parametrize("cls", BOTH)
def test_no_number_is_read_from_the_device(cls: type[Automatic], benchmark_script: Callable[[str], Any]) -> None:
    """transformers 36861: a count read in each cycle cost throughput. `skip_non_finite` says that it asks once."""
    strategies: dict[str, Any] = {
        "theirs": "auto",
        "ours": GACPStrategy(CYCLE, num_items="labels"),
        "asking": GACPStrategy(CYCLE, num_items="labels", skip_non_finite=True),
    }
    reads, counted = {}, benchmark_script("accumulation_overhead").Reads
    for name, strategy in strategies.items():
        with counted() as mode:
            quiet_trainer(strategy=strategy).fit(cls(), loader(ragged_batches([*LENGTHS[:-1], 80])))
        reads[name] = mode.count
    assert reads["ours"] == reads["theirs"] and reads["asking"] == reads["theirs"] + 3


# ---------------------------------------------------------------- the loss stays the module's own


class _LossInOutput(torch.autograd.Function):
    """Two outputs from one function: to scale one of them in place is an error of torch's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Any:
        both = torch.stack([loss, loss])
        return both[0], both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] + grads[1]


@pytest.mark.parametrize("cls", BOTH)
def test_a_loss_that_is_a_view_is_not_scaled_in_place(cls: type[Automatic]) -> None:
    """unsloth: "a view was modified in place"; nor is what callbacks are shown, which Lightning has divided by 4."""
    kept: list[tuple[Tensor, float]] = []
    shown: list[float] = []

    def viewed(net: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = _LossInOutput.apply(loss_of(net, batch))[0]  # type: ignore[no-untyped-call]
        kept.append((loss.detach(), loss.item()))  # the same memory, and the value
        return loss

    batches = ragged_batches(LENGTHS)
    module = cls(dtype=torch.float64, loss=viewed)
    show = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: shown.append(outputs["loss"].item()))
    quiet_trainer(strategy=GACPStrategy(CYCLE, num_items="labels"), callbacks=[show]).fit(module, loader(batches))
    values = [value for _, value in kept]
    assert [loss.item() for loss, _ in kept] == values
    assert shown == [value if cls is Manual else value / CYCLE for value in values]
    for found, wanted in zip(module.seen, reference_run(batches, CYCLE, dtype=torch.float64)[0], strict=True):
        assert relative_error(found, wanted) < 1e-12


# ---------------------------------------------------------------- nothing to step with


class ByClosure(Manual):
    """Runs its backward in a closure; a loss may be NaN by itself, or as a mean over no items."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(self.net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def masked_mean_or_nan(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    return masked_mean(net, batch) * (float("nan") if batch.get("overflows") else 1.0)


@pytest.mark.filterwarnings("ignore:A cycle of .* had no items at all:UserWarning")
@pytest.mark.filterwarnings("ignore:.* lost. a loss or a gradient of the cycle is infinite or NaN:UserWarning")
@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("cls", [*BOTH, ByClosure])
@pytest.mark.parametrize(
    "unusable",
    [ragged_batches([0, 0]), [{**batch, "overflows": True} for batch in ragged_batches([4, 5])]],
    ids=["no items", "not finite"],
)
def test_a_cycle_without_a_usable_loss_is_as_if_it_had_not_been(
    unusable: Any, cls: type[Automatic], cycle: int
) -> None:
    """torchtune 2341, automodel 3796: NaN, or a step of weight decay alone."""

    class Module(cls):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    usable = ragged_batches([6, 2, 9, 4])
    weights = []
    for batches in (usable, [*usable[:2], *unusable, *usable[2:]]):
        module = Module(dtype=torch.float64, loss=masked_mean_or_nan)
        trainer = quiet_trainer(strategy=GACPStrategy(cycle, num_items="labels", skip_non_finite=True))
        trainer.fit(module, loader(batches))
        assert trainer.global_step == len(module.seen) == len(usable) // cycle
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)
