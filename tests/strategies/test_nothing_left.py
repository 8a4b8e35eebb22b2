"""Host memory for offloaded activations goes with the fit that asked for it, however the fit ends.

What else a run might leave (files, shared memory, processes, threads, open descriptors) is looked for in every cell of
the fault matrix, and after SIGKILL in ``test_kill.py``.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from offload.simulated import SimulatedDevice
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lightning_gacp as gacp
from lightning_gacp.callbacks import activation_offload
from tests.strategies.models import loader, quiet_trainer


class Blocks(LightningModule):
    """Four blocks; ``end`` strikes in the second micro-batch of a cycle of three."""

    def __init__(self, manual: bool, end: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.automatic_optimization = not manual
        self.end = end

    def strikes(self, where: str) -> None:
        if self.end == where and self.trainer.fit_loop.epoch_loop.batch_idx == 4:
            raise KeyboardInterrupt if "interrupt" in where else ArithmeticError

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for number, layer in enumerate(self.layers):
            batch = layer(batch)
            if number == 2:
                self.strikes("exception in the forward")
                self.strikes("interrupt in the forward")
                batch.register_hook(lambda gradient: self.strikes("exception in the backward"))
        if self.end == "should_stop" and batch_idx == 4:
            self.trainer.should_stop = True
        if self.end == "no loss" and batch_idx == 4:
            return None
        loss = batch.square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


ENDS = [
    "as it should",
    "exception in the forward",
    "interrupt in the forward",
    "exception in the backward",
    "should_stop",
    "no loss",
]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_host_memory_is_given_back(end: str, manual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, slabs = SimulatedDevice(1), []
    allocate_host, offload_blocks = device.allocate_host, activation_offload.offload_blocks

    def allocating(nbytes: int) -> Tensor:
        slab = allocate_host(nbytes)
        slabs.append(StorageWeakRef(slab.untyped_storage()))
        return slab

    def on_the_device(*args: Any, **kwargs: Any) -> Any:
        return offload_blocks(*args, **{**kwargs, "device": device})

    monkeypatch.setattr(device, "allocate_host", allocating)
    monkeypatch.setattr(activation_offload, "offload_blocks", on_the_device)
    module = Blocks(manual, end)
    trainer = quiet_trainer(
        strategy=gacp.GACPStrategy(accumulate_grad_batches=3, num_items="samples"),
        callbacks=[gacp.ActivationOffload(min_bytes=0, keep_last=0)],
    )
    with device, suppress(ArithmeticError, SystemExit), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")  # what is said then is for other tests
        trainer.fit(module, loader([torch.randn(2, 8) for _ in range(7)]))
    assert device.copies and slabs
    gc.collect()  # exceptions, and what Lightning's parts hold of each other
    assert [slab for slab in slabs if not slab.expired()] == []
    assert type(module.layers[0]) is nn.Sequential
