"""Lightning's callbacks count optimizer steps in manual optimization as they do in automatic, with the same cycles."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

from lightning_gacp import GACPDDPStrategy, GACPStrategy
from strategies.models import HIDDEN, Automatic, Manual, loader, loss_of, quiet_trainer, ragged_batches
from strategies.parity import ListLogger

LENGTHS = [6, 2, 9, 4, 1, 7, 3, 5, 8, 2]  # cycles of 4, 4 and 2


class WithSchedule(Automatic):
    """Logs, and has a schedule that is stepped once a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.planned = 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(self.net, batch))

    def configure_optimizers(self):
        self.planned = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithScheduleManual(WithSchedule):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        schedule.step()
        return loss


BOTH = [WithSchedule, WithScheduleManual]


def fit(cls: type[WithSchedule], callbacks: list[Callback], cycle: int = 4, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = cls()
    strategy = kwargs.pop("strategy", None) or GACPStrategy(accumulate_grad_batches=cycle, num_items="labels")
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"enable_checkpointing": saves, "logger": ListLogger(), "log_every_n_steps": 1, "max_epochs": 2}
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **{**defaults, **kwargs})
    trainer.fit(module, loader(ragged_batches(LENGTHS)), loader(ragged_batches([3])))
    return trainer, module


@pytest.mark.parametrize("cls", BOTH)
def test_steps_are_optimizer_steps(cls):
    """3 cycles an epoch: planned, counted, scheduled; and the axis of the logger."""
    trainer, module = fit(cls, [])
    assert (module.planned, trainer.global_step, len(module.seen)) == (6, 6, 6)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6
    steps = [step for step, row in trainer.logger.rows if "loss" in row]
    assert set(steps) == {0, 1, 2, 3, 4, 5} and steps == sorted(steps)
    # Lightning writes a row for each micro-batch in manual optimization, on the axis of steps
    assert len(steps) == (20 if cls is WithScheduleManual else 6)


@pytest.mark.parametrize("cls", BOTH)
def test_max_steps(cls):
    trainer, module = fit(cls, [], max_steps=4, max_epochs=-1)
    assert trainer.global_step == len(module.seen) == module.planned == 4


def test_both_modes_end_with_the_same_weights():
    (_, automatic), (_, manual) = fit(WithSchedule, []), fit(WithScheduleManual, [])
    for a, b in zip(automatic.parameters(), manual.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
@pytest.mark.parametrize("cls", BOTH)
def test_checkpoint_every_n_steps(cls, tmp_path):
    """Saved after steps 2, 4 and 6, each once, with the weights after that step."""
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    _, module = fit(cls, [saver])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for name in names:
        saved = torch.load(tmp_path / name, weights_only=True)
        schedule = saved["lr_schedulers"][0]
        assert saved["global_step"] == int(name[5]) == schedule["last_epoch"]
    for key, value in torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"].items():
        assert torch.equal(value, module.state_dict()[key])


def test_checkpoint_by_time(tmp_path):
    """Lightning looks at the time in automatic optimization only: there it works, here it is said, once."""

    def saver(name: str) -> ModelCheckpoint:
        every = datetime.timedelta(seconds=0)
        return ModelCheckpoint(tmp_path / name, "{step}", train_time_interval=every, save_top_k=-1)

    fit(WithSchedule, [saver("automatic")])
    assert list((tmp_path / "automatic").iterdir())
    with pytest.warns(UserWarning, match="never saves in manual optimization.*every_n_train_steps") as said:
        fit(WithScheduleManual, [saver("manual")])
    assert sum("train_time_interval" in str(warning.message) for warning in said) == 1
    assert not (tmp_path / "manual").exists()


@pytest.mark.parametrize("cls", BOTH)
def test_learning_rate_monitor(cls):
    trainer, _ = fit(cls, [LearningRateMonitor("step")])
    rates: dict[int, set[float]] = {}
    for step, row in trainer.logger.rows:
        if "lr-SGD" in row:
            rates.setdefault(step, set()).add(round(float(row["lr-SGD"]), 12))
    # one rate a step, and the schedule's at that step
    assert rates == {step: {round(0.1 * 0.9**step, 12)} for step in range(6)}


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`, you need to define:UserWarning")
@pytest.mark.parametrize("cls", BOTH)
def test_throughput_monitor(cls):
    monitor = ThroughputMonitor(lambda batch: batch["inputs"].numel(), window_size=2)
    trainer, _ = fit(cls, [monitor])
    measured = [(step, row["train/batches"]) for step, row in trainer.logger.rows if "train/batches" in row]
    # at the end of each cycle
    assert measured == [(0, 4), (1, 8), (2, 10), (3, 14), (4, 18), (5, 20)]


def test_weight_averaging():
    """The average moves once a step, also in manual optimization: the same average."""
    averages = {}
    for cls in BOTH:
        updates = []

        class Counted(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None, updates=updates):
                if step_idx is not None:
                    updates.append(step_idx)
                return step_idx is not None

        averaging = Counted()
        _, module = fit(cls, [averaging])
        averages[cls] = module.state_dict()
        assert sorted(set(updates)) == [0, 1, 2, 3, 4, 5] or sorted(set(updates)) == [1, 2, 3, 4, 5, 6], updates
        assert len(updates) == 6
    for key, value in averages[WithSchedule].items():
        torch.testing.assert_close(value, averages[WithScheduleManual][key], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch:UserWarning")
@pytest.mark.parametrize("cls", BOTH)
def test_stochastic_weight_averaging(cls):
    """Its last epoch runs batches without a backward of ours; the average is that of the epochs' ends."""
    trainer, module = fit(cls, [StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=4)
    assert trainer.global_step == len(module.seen) == 12
    assert trainer.strategy.lost_micro_batches == 0
    swapped = trainer.lr_scheduler_configs[0].scheduler
    assert isinstance(swapped, torch.optim.swa_utils.SWALR)
    # It begins at 5. Lightning steps it once an epoch; by hand it is stepped with the optimizer: never inside a cycle.
    assert swapped.last_epoch == 5 + (12 if cls is WithScheduleManual else 4)


class _Normed(Automatic):
    """With a batch norm, so that the averaging ends with a pass for its statistics."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        net, norm = self.net, self.norm
        self.loss = lambda _, batch: loss_of(
            lambda inputs: net[3](net[2](norm(net[1](net[0](inputs)).transpose(1, 2)).transpose(1, 2))), batch
        )
        self.weights_of_epochs: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_start(self) -> None:
        self.weights_of_epochs.append({name: p.detach().clone() for name, p in self.named_parameters()})


class _NormedManual(_Normed, Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net, batch))
        self.clip_gradients(optimizer, gradient_clip_val=100.0)
        optimizer.step()


class _NormedClosure(_NormedManual):
    def training_step(self, batch, batch_idx):
        def closure() -> Tensor:
            loss = self.loss(self.net, batch)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)


@pytest.mark.parametrize("cycle", [1, 4])
def test_stochastic_weight_averaging_with_batch_norm(cycle):
    """The last pass, for the statistics, moves no weight in manual optimization either (Lightning's own does)."""
    states = []
    for cls in (_Normed, _NormedManual, _NormedClosure):
        # The rate is the optimizer's own: by hand nobody steps the schedule that the callback puts in.
        swa = StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=1)
        trainer, module = fit(cls, [swa], cycle, max_epochs=3)
        steps = 3 * -(-len(LENGTHS) // cycle)
        assert trainer.global_step == len(module.seen) == steps
        assert trainer.strategy.lost_micro_batches == 0
        assert module.norm.num_batches_tracked == len(LENGTHS)
        # Averaged are the weights with which the epochs from the first on began.
        for name, parameter in module.named_parameters():
            mean = torch.stack([weights[name] for weights in module.weights_of_epochs[:3]]).mean(0)
            torch.testing.assert_close(parameter.detach(), mean, rtol=1e-5, atol=1e-6)
        states.append(module.state_dict())
    for other in states[1:]:
        for key, value in states[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6)


class _Crashing(_Normed):
    crash_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.crash_at == self.current_epoch:
            raise ArithmeticError("the crash")
        return super().training_step(batch, batch_idx)


class _NothingLeftOver(Callback):
    """Lightning steps once more with the gradients of the last cycle, in the pass for the statistics."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop._skip_backward:
            pl_module.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("cycle", "crash_at"), [(1, 3), (2, 1)])
def test_stochastic_weight_averaging_resumed_on_launched_ranks(cycle: int, crash_at: int, tmp_path: Path) -> None:
    """A crash inside the averaging, and one before it begins: the error arrives, and what follows is as Lightning's."""

    def run(strategy: Any, path: Path, crash_at: int | None = None, ckpt_path: Any = None) -> dict[str, Tensor]:
        module = _Crashing()
        module.crash_at = crash_at
        swa = StochasticWeightAveraging(0.1, swa_epoch_start=2, annealing_epochs=1)
        trainer = quiet_trainer(
            strategy=strategy,
            devices=2,
            callbacks=[swa, _NothingLeftOver(), ModelCheckpoint(path)],
            enable_checkpointing=True,
            max_epochs=4,
            accumulate_grad_batches=cycle,
        )
        trainer.fit(module, loader(ragged_batches(LENGTHS[:8])), ckpt_path=ckpt_path)
        return module.state_dict()

    states = []
    for cls, options in ((DDPStrategy, {}), (GACPDDPStrategy, {"num_items": None})):
        path = tmp_path / cls.__name__
        with pytest.raises(ProcessRaisedException, match="ArithmeticError: the crash"):
            run(cls(start_method="fork", **options), path, crash_at)
        (checkpoint,) = path.iterdir()
        states.append(run(cls(start_method="fork", **options), path, ckpt_path=checkpoint))
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


def test_the_raw_optimizer_in_the_pass_for_the_statistics():
    class Raw(_Normed):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.net, batch))
            optimizer.step()

    with pytest.raises(MisconfigurationException, match="was called on the raw optimizer"):
        fit(Raw, [StochasticWeightAveraging(0.1, swa_epoch_start=1)], 1)


@pytest.mark.parametrize("cls", BOTH)
def test_accumulation_scheduler(cls):
    """Lightning refuses its own scheduler in manual optimization; the strategy's schedule serves both."""
    trainer, module = fit(cls, [], strategy=GACPStrategy({0: 4, 1: 2}, num_items="labels"))
    assert trainer.global_step == len(module.seen) == 3 + 5
    if cls is WithSchedule:
        theirs, same = fit(
            cls, [GradientAccumulationScheduler({0: 4, 1: 2})], strategy=GACPStrategy(num_items="labels")
        )
        assert theirs.global_step == 8
        for a, b in zip(module.parameters(), same.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cls", BOTH)
def test_early_stopping_and_timer(cls):
    trainer, _ = fit(cls, [EarlyStopping("val", patience=0, min_delta=100.0)], max_epochs=5)
    assert trainer.current_epoch == 2 and trainer.global_step == 6
    timer = Timer(datetime.timedelta(seconds=0), interval="step")
    trainer, module = fit(cls, [timer])
    assert trainer.should_stop and len(module.seen) == trainer.global_step


class Sized(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1

    def train_dataloader(self):
        rows = [{key: value[0] for key, value in batch.items()} for batch in ragged_batches([8] * 64)]
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]


class SizedManual(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    training_step = Manual.training_step
    trailing = False


@pytest.mark.parametrize("cls", [Sized, SizedManual])
def test_batch_size_finder(cls):
    """Runs its trials, leaves no half-filled cycle behind, and the fit is as long as it should be."""
    trainer = quiet_trainer(
        strategy=GACPStrategy(accumulate_grad_batches=2, num_items="labels"),
        callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=3)],
        max_epochs=1,
    )
    module = cls()
    trainer.fit(module)
    assert module.batch_size == 4
    assert trainer.global_step == 8 and trainer.strategy.lost_micro_batches == 0


def test_learning_rate_finder():
    """Automatic optimization only: Lightning refuses it in manual."""
    module = Sized()
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, num_items="labels"), max_epochs=1)
    found = Tuner(trainer).lr_find(module, num_training=8, update_attr=False)
    assert found is not None and len(found.results["lr"]) >= 8
    before: list[Tensor] = [p.clone() for p in module.parameters()]
    trainer.fit(module)
    assert not torch.equal(before[0], next(iter(module.parameters())))
