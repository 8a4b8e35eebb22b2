"""Names, devices, and the other import tree."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_gacp
from lightning_gacp import GACPDDPStrategy, GACPFSDPStrategy, GACPModelParallelStrategy, GACPStrategy
from tests.strategies.models import Automatic, Manual, count, loader, quiet_trainer, ragged_batches


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("gacp", GACPStrategy),
        ("gacp_ddp", GACPDDPStrategy),
        ("gacp_model_parallel", GACPModelParallelStrategy),
        ("gacp_fsdp", GACPFSDPStrategy),
    ],
)
def test_names_are_registered_by_the_import(name: str, cls: type) -> None:
    assert name in StrategyRegistry.available_strategies()
    assert isinstance(StrategyRegistry.get(name), cls)


def test_a_reload_of_the_package_registers_again() -> None:
    """As in a notebook."""
    GACPStrategy.register_strategies(StrategyRegistry)
    assert isinstance(StrategyRegistry.get("gacp"), GACPStrategy)


def test_trainer_takes_the_name() -> None:
    trainer = quiet_trainer(strategy="gacp", accumulate_grad_batches=2)
    module = Automatic()
    module.count_items = lambda batch: count([batch])  # type: ignore[assignment]
    trainer.fit(module, loader(ragged_batches([4, 5, 3, 6])))
    assert trainer.strategy.counting == "the module's own `count_items(batch)`"
    assert isinstance(trainer.strategy, GACPStrategy)
    assert trainer.global_step == 2


def test_trainer_takes_the_path_of_the_class() -> None:
    """As Lightning's command line hands it over, when nothing else is said with it."""
    trainer = quiet_trainer(strategy="lightning_gacp.GACPStrategy")
    assert isinstance(trainer.strategy, GACPStrategy)


def test_the_trainers_number_counts_in_manual_optimization() -> None:
    """Lightning refuses it; ours takes it, gives it back, and the weights are those of the strategy's own setting."""
    batches = ragged_batches([4, 5, 3, 6, 2])
    weights = []
    for ours, theirs in ((2, 1), (None, 2)):
        strategy = GACPStrategy(accumulate_grad_batches=ours, num_items="labels")
        trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=theirs)
        for _ in range(2):  # a second fit begins where the first has left the Trainer
            module = Manual()
            trainer.fit(module, loader(batches))
            assert trainer.accumulate_grad_batches == theirs
        weights.append([parameter.detach() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))
    refused = quiet_trainer(strategy="gacp", accumulate_grad_batches=2, gradient_clip_val=1.0)
    with pytest.raises(MisconfigurationException, match="Automatic gradient clipping is not supported"):
        refused.fit(Manual(), loader(batches))
    assert refused.accumulate_grad_batches == 2


@pytest.fixture
def two_cuda_devices() -> Any:
    """Makes Lightning believe in two CUDA devices."""
    with (
        mock.patch.object(CUDAAccelerator, "is_available", return_value=True),
        mock.patch("lightning.fabric.accelerators.cuda.num_cuda_devices", return_value=2),
        mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=2, create=True),
        mock.patch("torch.cuda.device_count", return_value=2),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_name", return_value="simulated"),
    ):
        yield


@pytest.mark.usefixtures("two_cuda_devices")
@pytest.mark.parametrize("strategy", ["gacp", GACPStrategy()])
def test_gpu_trainer_trains_on_the_gpu(strategy: Any) -> None:
    """Lightning hands devices only to strategies with ``parallel_devices``: else this one would stay on the CPU."""
    trainer = Trainer(accelerator="gpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    assert trainer.strategy.root_device == torch.device("cuda", 0)


@pytest.mark.usefixtures("two_cuda_devices")
def test_second_gpu() -> None:
    trainer = Trainer(accelerator="gpu", devices=[1], strategy="gacp", logger=False, enable_checkpointing=False)
    assert trainer.strategy.root_device == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_cuda_devices")
def test_several_gpus_name_the_strategy_to_take() -> None:
    with pytest.raises(MisconfigurationException, match=r'found 2\. Set `devices=1`, or write `strategy="gacp_ddp"`'):
        Trainer(accelerator="gpu", devices=2, strategy="gacp", logger=False, enable_checkpointing=False)


def test_several_cpu_processes_name_the_strategy_to_take() -> None:
    with pytest.raises(MisconfigurationException, match="trains on one device, and the Trainer found 2"):
        Trainer(accelerator="cpu", devices=2, strategy=GACPStrategy(), logger=False, enable_checkpointing=False)


def test_trainer_of_the_other_import_tree_says_what_to_import() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"write `import lightning.pytorch as pl`, not `pytorch_lightning`"):
        pl.Trainer(strategy=GACPStrategy(), logger=False)


def test_module_of_the_other_import_tree_says_what_to_import() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    with pytest.raises(TypeError, match="single import style"):
        quiet_trainer(strategy=GACPStrategy()).fit(pl.LightningModule(), loader([]))


def test_repr_without_the_other_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    assert repr(GACPStrategy()) == "<GACPStrategy of `lightning_gacp`>"


def test_exports() -> None:
    """Every name of the package's list is there, and the list is sorted."""
    assert all(hasattr(lightning_gacp, name) for name in lightning_gacp.__all__)
    assert list(lightning_gacp.__all__) == sorted(lightning_gacp.__all__)
