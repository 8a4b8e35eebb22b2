"""With cycles of 1 our strategies are Lightning's: weights bit for bit, every hook in its order, logs, checkpoints.

Each scenario runs three times: Lightning's strategy, ours, and ours without recording (to record is to override every
hook, and a module that reads gradients late keeps them longer). Automatic optimization here, manual in the file beside.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gacp import GACPStrategy
from strategies.models import loader, quiet_trainer
from strategies.parity import (
    RecordingCallback,
    RecordingHooks,
    Small,
    Tape,
    assert_same,
    pairs,
    run,
    shown,
)


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


class Stream(IterableDataset):
    def __iter__(self):
        yield from pairs(5)


def compare(module: Any, data: Any = lambda: loader(pairs()), strategy: Any = GACPStrategy, **kwargs: Any) -> None:
    def kwargs_now() -> dict[str, Any]:
        return {key: value() if callable(value) else value for key, value in kwargs.items()}

    theirs = run(module, data, SingleDeviceStrategy(torch.device("cpu")), **kwargs_now())
    assert len(theirs.events) > 20
    assert_same(theirs, run(module, data, strategy(), **kwargs_now()))
    silent = run(module, data, strategy(), record=False, **kwargs_now())
    assert_same(dataclasses.replace(theirs, events=[]), silent)


BATCHES = {
    "tuple": lambda: loader(pairs()),
    "list": lambda: loader([list(pair) for pair in pairs()]),
    "dict": lambda: loader([{"x": x, "y": y} for x, y in pairs()]),
    "dataclass": lambda: loader([Batch(x, y) for x, y in pairs()]),
    "shuffled": lambda: DataLoader(
        TensorDataset(*(torch.cat(part) for part in zip(*pairs(), strict=True))), batch_size=3, shuffle=True
    ),
    "unsized": lambda: DataLoader(Stream(), batch_size=None),
    "of unequal size": lambda: loader([(x[: i + 1], y[: i + 1]) for i, (x, y) in enumerate(pairs(4))]),
}


@pytest.mark.parametrize("data", BATCHES.values(), ids=BATCHES)
def test_any_batch(data):
    compare(Small, data)


class Several(Small):
    def loss(self, batch):
        if isinstance(batch, (dict, list)) and not isinstance(batch[0] if isinstance(batch, list) else None, Tensor):
            values = [b for b in (batch.values() if isinstance(batch, dict) else batch) if b is not None]
            return sum(super(Several, self).loss(b) for b in values)
        return super().loss(batch)


LOADERS = {
    "dict": lambda: {"a": loader(pairs(3)), "b": loader(pairs(4))},
    "list": lambda: [loader(pairs(3)), loader(pairs(4))],
    "min_size": lambda: CombinedLoader({"a": loader(pairs(3)), "b": loader(pairs(4))}, "min_size"),
    "max_size": lambda: CombinedLoader({"a": loader(pairs(3)), "b": loader(pairs(4))}, "max_size"),
    "max_size_cycle": lambda: CombinedLoader([loader(pairs(2)), loader(pairs(3))], "max_size_cycle"),
}


@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
def test_several_loaders(data):
    class Module(Several):
        def training_step(self, batch, batch_idx, dataloader_idx=0):
            return super().training_step(batch, batch_idx)

    compare(Module, data)


class OverIterator(Small):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=4)
        return loss


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_dataloader_iter():
    compare(OverIterator)


class ReadsOverIterator(OverIterator):
    def on_before_zero_grad(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).sum() if norms else torch.zeros(()), batch_size=4)


class AccumulatesOverIterator(OverIterator):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
@pytest.mark.parametrize("cls", [ReadsOverIterator, AccumulatesOverIterator])
def test_gradients_of_the_last_step_are_there_for_the_hooks_of_zeroing_under_dataloader_iter(cls):
    compare(cls)


class SometimesNone(Small):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class DictOutput(Small):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "more": loss.detach() * 2, "text": "x"}


class SkipsBatches(Small):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class OwnBackward(Small):
    def backward(self, loss, *args, **kwargs):
        (loss * 2).backward(*args, **kwargs)


class OwnStep(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:  # warm-up by hand
            group["lr"] = 0.01 * (batch_idx + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StepsEverySecond(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class StepsTheRawOne(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.optimizer.step()


class ClosureFirst(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.step()


class OwnZeroGrad(Small):
    """Accumulates by itself: zeroes every second time."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


class OwnClipping(Small):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class ReadsGradients(Small):
    def on_before_zero_grad(self, optimizer):
        grads = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(grads).sum() if grads else torch.zeros(()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("at_end", sum(p.grad.norm() for p in self.parameters()))


class EverySchedule(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


class Plateau(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class OwnSchedulerStep(EverySchedule):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.logger.log_metrics({"lr": scheduler.get_last_lr()[0]}, self.global_step)


class WithLBFGS(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class PartlyFrozen(Small):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class NoOptimizer(Small):
    def configure_optimizers(self):
        return None


class StopsItself(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True


class Configured(Small):
    def configure_model(self):
        if not hasattr(self, "third"):
            self.third = torch.nn.Linear(3, 3)

    def loss(self, batch):
        return super().loss((self.third(batch[0]), batch[1]))


AUTOMATIC = [
    *(Small, SometimesNone, DictOutput, SkipsBatches, OwnBackward, OwnStep, StepsEverySecond, ClosureFirst),
    *(StepsTheRawOne, OwnZeroGrad, OwnClipping, ReadsGradients, EverySchedule, Plateau, OwnSchedulerStep, WithLBFGS),
    *(PartlyFrozen, StopsItself, Configured),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Found .* module.s. in eval mode:UserWarning")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("module", AUTOMATIC)
def test_what_a_module_may_do(module):
    compare(module, val_data=lambda: loader(pairs(2)), val_check_interval=2)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`:UserWarning")
def test_no_optimizer():
    compare(NoOptimizer)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3))


TRAINERS: dict[str, dict[str, Any]] = {
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    # the first steps overflow: skipped by the scaler
    "16-mixed": {"plugins": scaled},
    "16-mixed, clipped": {"plugins": scaled, "gradient_clip_val": 0.1},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "limit 3": {"limit_train_batches": 3},
    "limit 0.5": {"limit_train_batches": 0.5},
    "anomaly": {"detect_anomaly": True},
    "overfit": {"overfit_batches": 2},
    "every epoch new loaders": {"reload_dataloaders_every_n_epochs": 1},
    "deterministic": {"deterministic": True},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run 3": {"fast_dev_run": 3},
    "barebones": {"barebones": True, "log_every_n_steps": None, "logger": None},
    "min_steps": {"min_steps": 7, "max_epochs": 1},
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step:UserWarning")
@pytest.mark.filterwarnings("ignore:You are using `torch.autograd.detect_anomaly:UserWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning")
@pytest.mark.parametrize("kwargs", TRAINERS.values(), ids=TRAINERS)
@pytest.mark.parametrize("module", [EverySchedule, SometimesNone])
def test_what_a_trainer_may_be_told(module, kwargs):
    if kwargs.get("gradient_clip_algorithm") == "value" and module is SometimesNone:
        pytest.skip("torch cannot clip no gradients by value")
    if "plugins" in kwargs and module is EverySchedule:
        module = (
            Small  # a step that the scaler skips moves Lightning's schedules, and not ours: wanted, tested elsewhere
        )
    compare(module, **kwargs)


@pytest.mark.parametrize("interval", [1, 3, 0.4, 1.0])
@pytest.mark.parametrize("data", ["tuple", "unsized"])
def test_validation_at_intervals(data, interval):
    """By batches and by fractions of an epoch, over epochs too (``None`` as the number of epochs between)."""
    if data == "unsized" and interval == 0.4:
        pytest.skip("Lightning takes a fraction of a sized loader only")
    over_epochs = {"check_val_every_n_epoch": None} if interval == 3 else {}
    compare(Plateau, BATCHES[data], val_data=lambda: loader(pairs(2)), val_check_interval=interval, **over_epochs)


class EveryLoop(Small):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


@pytest.mark.parametrize("fitted", [False, True])
def test_loops_without_training(fitted):
    """Validation, test and prediction, of a fresh Trainer and after a fit, with several loaders."""

    def found(strategy: Any) -> list[Any]:
        torch.manual_seed(3)
        module = EveryLoop()
        tape = Tape()
        module.__class__ = type("EveryLoop", (RecordingHooks, EveryLoop), {})
        module.tape = tape
        trainer = quiet_trainer(strategy=strategy, callbacks=[RecordingCallback(tape)], max_epochs=1)
        if fitted:
            trainer.fit(module, loader(pairs(3)), loader(pairs(2)))
        results: list[Any] = [trainer.validate(module, [loader(pairs(2)), loader(pairs(1))], verbose=False)]
        results.append(trainer.test(module, loader(pairs(2)), verbose=False))
        results.append(trainer.predict(module, loader(pairs(2))))
        if fitted:
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, loader(pairs(3)))
        return [tape.events, shown(results), shown(dict(module.state_dict()))]

    theirs, ours = found(SingleDeviceStrategy(torch.device("cpu"))), found(GACPStrategy())
    assert len(theirs[0]) > 20
    assert theirs == ours


@pytest.mark.parametrize("name", ["lr_find", "scale_batch_size"])
def test_tuners(name):
    """They find the same, and leave the same weights and the same Trainer."""

    class Tuned(Small):
        batch_size = 1
        lr = 0.01

        def train_dataloader(self):
            rows = TensorDataset(*(torch.cat(part) for part in zip(*pairs(10), strict=True)))
            return DataLoader(rows, batch_size=self.batch_size)

        def val_dataloader(self):
            return loader(pairs(2))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def found(strategy: Any) -> list[Any]:
        torch.manual_seed(3)
        module = Tuned()
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, log_every_n_steps=1)
        if name == "lr_find":
            result: Any = Tuner(trainer).lr_find(module, num_training=12).results  # type: ignore[union-attr]
        else:
            result = Tuner(trainer).scale_batch_size(module, max_trials=3, steps_per_trial=2)
        tuned = (module.lr, module.batch_size)
        trainer.fit(module)
        return [shown(result), tuned, trainer.global_step, shown(dict(module.state_dict()))]

    assert found(SingleDeviceStrategy(torch.device("cpu"))) == found(GACPStrategy())


@pytest.mark.parametrize("strategy", [lambda: GACPStrategy(num_items=None), lambda: GACPStrategy(num_items="samples")])
def test_whatever_is_counted(strategy):
    compare(DictOutput, BATCHES["of unequal size"], strategy)


class _StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


@pytest.mark.parametrize("writer, reader", [("gacp", "auto"), ("auto", "gacp"), ("gacp", "gacp")])
def test_checkpoints_are_interchangeable(tmp_path, writer, reader):
    """Two epochs, two more with the other strategy: as four with Lightning's alone."""

    def data():
        return loader(pairs())

    whole = run(EverySchedule, data, "auto", record=False, max_epochs=4)
    saved = tmp_path / "x.ckpt"
    first = run(EverySchedule, data, writer, record=False, max_epochs=4, callbacks=[_StopAfter(2)], checkpoint=saved)
    assert first.steps == 10
    second = run(EverySchedule, data, reader, record=False, max_epochs=4, resume=saved)
    assert_same(dataclasses.replace(whole, rows=whole.rows[len(whole.rows) // 2 :]), second)
    contents = torch.load(saved, weights_only=True)
    plain = tmp_path / "y.ckpt"
    run(EverySchedule, data, "auto", record=False, max_epochs=4, callbacks=[_StopAfter(2)], checkpoint=plain)
    assert contents.keys() - {"lightning_gacp"} == torch.load(plain, weights_only=True).keys()
