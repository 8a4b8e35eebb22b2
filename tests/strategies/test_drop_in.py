"""What Lightning's own strategies do outside a fit, and where a launcher's processes run it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_gacp.strategies import GACPFSDPStrategy, GACPModelParallelStrategy, GACPStrategy
from lightning_gacp.strategies.schedulers import gate_scheduler, release_scheduler
from tests.strategies.models import BoringEitherWay

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Stumbling(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ArithmeticError("the second batch")
        return super().training_step(batch, batch_idx)


def test_error_of_a_launched_process_is_the_one_that_is_raised() -> None:
    """The main process has attached no Trainer to the module when it hears of it."""
    trainer = Trainer(strategy="gacp_ddp_fork", devices=1, accumulate_grad_batches=4, max_epochs=1, **QUIET)
    with pytest.raises(ProcessRaisedException, match="ArithmeticError: the second batch"):
        trainer.fit(Stumbling())


def test_model_without_a_fit_is_saved(tmp_path: Path) -> None:
    trainer = Trainer(strategy="gacp", **QUIET)
    model = BoringModel()
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "connected.ckpt")
    saved = torch.load(tmp_path / "connected.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.layer.weight)
    assert trainer.strategy.load_checkpoint(tmp_path / "connected.ckpt").keys() == saved.keys()


def test_stand_in_for_a_module_is_connected() -> None:
    """Tests of other projects connect mocks, which have the attributes of the class alone."""
    strategy, stand_in = GACPStrategy(), Mock(spec=BoringModel)
    strategy.connect(stand_in)
    assert strategy.lightning_module is stand_in


@pytest.mark.parametrize("module_class", [BoringModel, ManualOptimBoringModel])
def test_trainer_is_pickled_and_copied_after_a_fit(module_class: type[BoringModel]) -> None:
    """To `torch.save` a module that has trained does the same. The last cycle's result was not asked for before."""
    trainer = Trainer(strategy=GACPStrategy(2), max_epochs=1, limit_train_batches=4, limit_val_batches=0, **QUIET)
    trainer.fit(module_class())
    twins = pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)
    result = trainer.strategy.cycle_result  # type: ignore[attr-defined]
    assert result.index == 1 and result.loss is not None
    for twin in twins:
        theirs = twin.strategy.cycle_result
        assert theirs.index == 1 and torch.equal(theirs.loss, result.loss)


@pytest.mark.parametrize("strategy_class", [GACPModelParallelStrategy, GACPFSDPStrategy])
def test_refusals_of_lightning_come_first_outside_a_fit(strategy_class: Any, tmp_path: Path) -> None:
    """A checkpoint is looked into only where it may have an open cycle to carry."""
    with pytest.raises(TypeError, match="storage_options"):
        strategy_class().save_checkpoint(object(), tmp_path / "refused.ckpt", storage_options={"retries": 3})


class Keeping(BoringModel):
    """Keeps the checkpoints that its hooks are shown."""

    def on_fit_start(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shown.append(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint.keys()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("batches", [2, 3])
def test_hooks_see_the_checkpoints_of_lightning(batches: int, tmp_path: Path) -> None:
    """What is added for the cycle, open after 3 batches and closed after 2, is in the file alone."""
    seen = []
    for strategy in ("auto", "gacp"):
        model, path = Keeping(), tmp_path / f"{strategy}.ckpt"
        options = {"strategy": strategy, "accumulate_grad_batches": 2, "max_epochs": 1, "limit_val_batches": 0, **QUIET}
        save = LambdaCallback(
            on_train_batch_end=lambda trainer, *args, path=path: (
                args[-1] == batches - 1 and trainer.save_checkpoint(path)
            )
        )
        Trainer(callbacks=save, limit_train_batches=4, **options).fit(model)
        resumed = Keeping()
        Trainer(limit_train_batches=4, **options).fit(resumed, ckpt_path=path)
        seen.append(([checkpoint.keys() for checkpoint in model.shown], resumed.loaded))
    assert seen[0] == seen[1]
    assert "lightning_gacp" in torch.load(path, weights_only=True)


def test_strategy_without_a_trainer_leaves_loaders_and_batches_alone() -> None:
    strategy = GACPStrategy(device="cpu")
    loader: DataLoader[Any] = DataLoader([1, 2, 3])  # type: ignore[arg-type]
    assert strategy.process_dataloader(loader) is loader
    strategy.connect(BoringModel())
    assert strategy.process_dataloader(loader) is loader
    batch = torch.ones(2)
    assert strategy.batch_to_device(batch) is batch


def test_scheduler_with_a_step_that_is_no_method() -> None:
    """``step`` is looked up as an instance would: a static method, or a stand-in for one, gets no ``self``."""
    seen: list[tuple[Any, ...]] = []

    class Static:
        @staticmethod
        def step(*args: Any) -> int:
            seen.append(args)
            return len(seen)

    scheduler = Static()
    gate_scheduler(scheduler, lambda: True)
    assert scheduler.step(7) == 1
    assert seen == [(7,)]
    release_scheduler(scheduler)
    assert type(scheduler) is Static


class Interrupted(BoringEitherWay):
    """Ends the run between the backward and the step of the third batch."""

    def on_after_backward(self) -> None:
        if self.global_step == 2:
            raise ArithmeticError("a look at the gradients")


@pytest.mark.parametrize("automatic", [True, False])
def test_exception_without_accumulation_leaves_the_gradients_and_says_nothing(
    automatic: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Whoever looks for the cause finds what Lightning leaves: nothing had been gathered that could be lost."""
    left = []
    for strategy in ("auto", "gacp"):
        torch.manual_seed(1)
        model = Interrupted(automatic)
        trainer = Trainer(strategy=strategy, max_epochs=1, limit_train_batches=4, limit_val_batches=0, **QUIET)
        with pytest.raises(ArithmeticError, match="a look"):
            trainer.fit(model)
        left.append(model.layer.weight.grad)
    assert left[0] is not None and left[1] is not None
    assert torch.equal(left[0], left[1])
    assert not [warning for warning in recwarn if "lost" in str(warning.message)]
