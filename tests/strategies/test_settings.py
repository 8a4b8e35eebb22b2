"""Settings in effect: released gradients, their dtype, looking ahead, fetching by hand, counts with the loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_gacp import GACPStrategy
from strategies.models import (
    Automatic,
    Manual,
    big_batch_gradients,
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


def fit(module: Any, data: Any, cycle: Any = 4, epochs: int = 1, trainer: dict[str, Any] | None = None, **kwargs: Any):
    strategy = GACPStrategy(accumulate_grad_batches=cycle, **{"num_items": "labels", **kwargs})
    quiet_trainer(strategy=strategy, max_epochs=epochs, **(trainer or {})).fit(module, data)
    return strategy


def assert_exact(module: Automatic, expected: list[list[Tensor]], tolerance: float = 1e-12) -> None:
    assert len(module.seen) == len(expected)
    for found, wanted in zip(module.seen, expected, strict=True):
        assert relative_error(found, wanted) < tolerance


# ---------------------------------------------------------------- any partition, through the Trainer


class Prescaled(Automatic):
    def training_step(self, batch, batch_idx, num_items_in_batch):
        return self.loss(self.net, batch, "sum") / max(num_items_in_batch, 1)


class Summed(Automatic):
    def training_step(self, batch, batch_idx):
        return self.loss(self.net, batch, "sum")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 5),
    st.sampled_from(["mean", "sum", "prescaled"]),
    st.booleans(),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-6)]),
)
@pytest.mark.filterwarnings("ignore:A cycle of .* had no items at all:UserWarning")
def test_any_partition(lengths, cycle, reduction, by_hand, dtype_and_tolerance):
    """Any lengths (many zero, with a loss that is NaN there), any cycle: each step is the big-batch step."""
    dtype, tolerance = dtype_and_tolerance
    batches = ragged_batches(lengths)
    expected, _ = reference_run(batches, cycle, dtype=dtype)
    if reduction == "mean":
        module = (Manual if by_hand else Automatic)(dtype=dtype, loss=masked_mean)
    else:
        module = {"sum": Summed, "prescaled": Prescaled}[reduction](dtype=dtype)
    fit(module, loader(batches), cycle, loss_reduction=reduction)
    assert_exact(module, expected, tolerance)


# ---------------------------------------------------------------- gradients


class Peak(Automatic):
    """Bytes of gradients that exist when a forward ends."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bytes: list[int] = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        grads = {
            p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
            for p in self.parameters()
            if p.grad is not None
        }
        self.bytes.append(sum(grads.values()))
        return loss


class PeakManual(Peak):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize("cls", [Peak, PeakManual])
def test_gradients_do_not_live_through_the_first_forward_of_a_cycle(cls):
    """The peak at the end of that forward falls by all gradients, to the byte; inside a cycle they have to be there."""
    size = sum(p.numel() * p.element_size() for p in make_net().parameters())
    freed, kept = cls(), cls()
    fit(freed, loader(ragged_batches(LENGTHS)), 2)
    fit(kept, loader(ragged_batches(LENGTHS)), 2, free_gradients=False)
    # In manual optimization what the open cycle has gathered was set aside by `step`, and is not in `.grad`.
    inside = size if cls is Peak else 0
    assert freed.bytes == [0, inside] * 5
    assert kept.bytes == [0, inside] + [size, inside] * 4
    for a, b in zip(freed.parameters(), kept.parameters(), strict=True):
        assert torch.equal(a, b)


def test_readers_of_gradients_still_find_them():
    """In `on_train_batch_end` by release time; in `on_before_zero_grad` because such a module keeps them."""
    found: dict[str, list[bool]] = {"end": [], "zero": []}

    class Reader(Automatic):
        def on_train_batch_end(self, *_):
            found["end"].append(all(p.grad is not None for p in self.parameters()))

    class LateReader(Automatic):
        def on_before_zero_grad(self, optimizer):
            found["zero"].append(all(p.grad is not None for p in self.parameters()))

    for cls in (Reader, LateReader):
        fit(cls(), loader(ragged_batches(LENGTHS)), 5)
    assert found == {"end": [True] * 10, "zero": [False, True]}


def test_grad_dtype_removes_the_error_of_accumulation(benchmark_script):
    errors = benchmark_script("grad_dtype").errors()
    assert errors["bfloat16"] > 3e-3
    assert errors["float32"] < 1e-5


# ---------------------------------------------------------------- the items of the cycle, ahead of it


class Stream(IterableDataset):
    def __iter__(self):
        yield from ragged_batches(LENGTHS)


class Told(Prescaled):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.told: list[float] = []

    def training_step(self, batch, batch_idx, num_items_in_batch):
        self.told.append(num_items_in_batch)
        return super().training_step(batch, batch_idx, num_items_in_batch)


LOADERS = {
    "sized": lambda: loader(ragged_batches(LENGTHS)),
    "unsized": lambda: DataLoader(Stream(), batch_size=None),
    "workers": lambda: DataLoader(ragged_batches(LENGTHS), batch_size=None, num_workers=1),  # type: ignore[arg-type]
    "no loader": lambda: ragged_batches(LENGTHS),
}


@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("limit, used", [(1.0, 10), (7, 7), (0.5, 5)], ids=["all", "7", "half"])
def test_every_micro_batch_is_told_the_items_of_its_cycle(data, limit, used):
    """Over two epochs; never past the limit; a short cycle has its own number."""
    if limit == 0.5 and data is LOADERS["unsized"]:
        pytest.skip("Lightning takes a fraction of a sized loader only")
    if data is LOADERS["no loader"]:
        pytest.skip("Lightning reads a list as several loaders")
    module = Told(dtype=torch.float64)
    fit(module, data(), epochs=2, trainer={"limit_train_batches": limit})
    batches = ragged_batches(LENGTHS)[:used]
    cycles = [batches[start : start + 4] for start in range(0, used, 4)]
    assert module.told == [count(cycle) for cycle in cycles for _ in cycle] * 2
    assert_exact(module, reference_run(batches, 4, epochs=2, dtype=torch.float64)[0])


def test_looking_ahead_reads_one_cycle_and_no_more():
    """What has been fetched when a micro-batch runs."""
    fetched: list[int] = []

    class Watched(IterableDataset):
        def __iter__(self):
            for i, batch in enumerate(ragged_batches(LENGTHS)):
                fetched.append(i)
                yield batch

    class Notes(Told):
        def training_step(self, batch, batch_idx, num_items_in_batch):
            ahead.append(len(fetched) - batch_idx)
            return super().training_step(batch, batch_idx, num_items_in_batch)

    ahead: list[int] = []
    fit(Notes(), DataLoader(Watched(), batch_size=None), trainer={"limit_train_batches": 6})
    # Lightning itself fetches one batch more than it trains on where the length is not known
    assert max(ahead) <= 4 + 4 and len(fetched) <= 6


def test_samplers_are_told_the_epoch():
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    rows = ragged_batches(LENGTHS)
    data: Any = DataLoader(rows, sampler=Sampler(rows), batch_size=None)  # type: ignore[arg-type]
    fit(Told(), data, epochs=3)
    assert epochs == [0, 1, 2]


# ---------------------------------------------------------------- other ways to count


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
@pytest.mark.parametrize("manual", [False, True])
def test_counted_as_the_module_fetches(manual):
    class Fetches(Manual if manual else Automatic):  # type: ignore[misc]
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    for free in (True, False):
        module = Fetches(dtype=torch.float64)
        fit(module, loader(ragged_batches(LENGTHS)), epochs=2, free_gradients=free)
        assert_exact(module, reference_run(ragged_batches(LENGTHS), 4, epochs=2, dtype=torch.float64)[0])


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("without", [0, 2, 3])
def test_fetching_with_a_step_that_gives_no_loss(without):
    """At the start, inside and at the end of a cycle of 4."""

    class Fetches(Automatic):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return None if batch_idx % 4 == without else super().training_step(batch, batch_idx)

    batches = ragged_batches(LENGTHS[:8])
    module = Fetches(dtype=torch.float64)
    fit(module, loader(batches))
    used = [batch for i, batch in enumerate(batches) if i % 4 != without]
    assert_exact(module, reference_run(used, 3, dtype=torch.float64)[0])


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_fetching_and_looking_ahead_exclude_each_other():
    class Both(Automatic):
        def training_step(self, dataloader_iter, num_items_in_batch):
            raise AssertionError

    with pytest.raises(MisconfigurationException, match="`dataloader_iter` and for `num_items_in_batch`"):
        fit(Both(), loader(ragged_batches(LENGTHS)))


@pytest.mark.parametrize("manual", [False, True])
def test_counts_that_come_with_the_loss(manual):
    """Known only after the forward; a count that was right before it is overruled."""

    class HandsOver(Automatic):
        def training_step(self, batch, batch_idx):
            loss, items = self.loss(self.net, batch), count([batch])
            if not manual:
                return {"loss": loss, "num_items": items}
            self.optimizers().zero_grad()
            self.manual_backward(loss, num_items=items)
            self.optimizers().step()
            return None

    module = HandsOver(dtype=torch.float64)
    module.automatic_optimization = not manual
    strategy = fit(module, loader(ragged_batches(LENGTHS)), num_items="samples")
    assert strategy.counting == "the items that come with each loss"
    assert_exact(module, reference_run(ragged_batches(LENGTHS), 4, dtype=torch.float64)[0])


def test_the_modules_own_count():
    class Own(Automatic):
        def count_items(self, batch):
            return count([batch])

    module = Own(dtype=torch.float64)
    strategy = fit(module, loader(ragged_batches(LENGTHS)), num_items="auto")
    assert strategy.counting == "the module's own `count_items(batch)`"
    assert_exact(module, reference_run(ragged_batches(LENGTHS), 4, dtype=torch.float64)[0])


def test_ambiguous_targets_warn_once_and_weigh_the_same():
    batches = ragged_batches(LENGTHS[:8])
    module = Automatic(dtype=torch.float64)
    with pytest.warns(UserWarning, match="`num_items='auto'` found targets of shape") as said:
        strategy = fit(module, loader(batches), num_items="auto")
    assert sum("num_items='auto'" in str(warning.message) for warning in said) == 1
    assert strategy.counting == "micro-batches (each weighs the same)"
    net = make_net(torch.float64)
    mean_of_means = sum(loss_of(net, batch) for batch in batches[:4]) / 4
    assert isinstance(mean_of_means, Tensor)
    expected = list(torch.autograd.grad(mean_of_means, list(net.parameters())))
    assert relative_error(module.seen[0], expected) < 1e-12
    assert relative_error(module.seen[0], big_batch_gradients(net, batches[:4])) > 0.01


@pytest.mark.parametrize("cls", [Automatic, Manual])
def test_the_advice_on_equal_weights_comes_when_a_schedule_leaves_cycles_of_one(cls):
    """In cycles of 1 nothing is weighted, and there is nothing to warn of."""
    said_at: list[int] = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer, module):
            said_at.append(sum("num_items='auto'" in str(warning.message) for warning in said))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = {"callbacks": [Notes()]}
        fit(cls(), loader(ragged_batches(LENGTHS)), {0: 1, 2: 4}, epochs=4, num_items="auto", trainer=trainer)
    assert said_at == [0, 0, 1, 1]
