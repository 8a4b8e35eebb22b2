"""The callback: same arguments as the function, applied in a fit and only there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gacp.callbacks import activation_offload
from lightning_gacp.callbacks.activation_offload import ActivationOffload
from lightning_gacp.wrapping import layer_of


class Module(pl.LightningModule):
    """Four blocks, made where a model can be made."""

    def __init__(self, made_in: str = "__init__", fails: bool = False) -> None:
        super().__init__()
        self.made_in = made_in
        self.fails = fails
        self.seen: list[bool] = []
        self.layers: nn.ModuleList | None = None
        if made_in == "__init__":
            self._make()

    def _make(self) -> None:
        if self.layers is None:
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def setup(self, stage: str) -> None:
        if self.made_in == "setup":
            self._make()

    def configure_model(self) -> None:
        if self.made_in == "configure_model":
            self._make()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.layers is not None
        self.seen.append(layer_of(self.layers[0], "offload") is not None)
        if self.fails:
            raise RuntimeError("on purpose")
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Module, *callbacks: pl.Callback) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), batch_size=2))


def weights(module: Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_without_an_accelerator_it_says_one_line_and_trains_the_same(caplog: pytest.LogCaptureFixture) -> None:
    plain, offloaded = Module(), Module()
    fit(plain)
    with caplog.at_level(logging.INFO, logger="lightning_gacp"):
        fit(offloaded, ActivationOffload())
    lines = [record.message for record in caplog.records if record.name == "lightning_gacp"]
    assert len(lines) == 1 and "no accelerator" in lines[0]
    assert all(map(torch.equal, weights(plain), weights(offloaded)))


@pytest.mark.parametrize("made_in", ["__init__", "setup", "configure_model"])
def test_blocks_are_offloaded_wherever_they_are_made(made_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, callback = Module(made_in), ActivationOffload(min_bytes=0, keep_last=0)
    with pretend_an_accelerator(monkeypatch) as device:
        fit(module, callback)
    assert device.copies
    assert module.seen == [True, True]
    assert module.layers is not None
    assert layer_of(module.layers[0], "offload") is None, "given back after the fit"
    assert "configure_model" not in module.__dict__


def test_it_is_undone_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(fails=True)
    with pretend_an_accelerator(monkeypatch), pytest.raises(RuntimeError, match="on purpose"):
        fit(module, ActivationOffload())
    assert module.seen == [True]
    assert module.layers is not None and type(module.layers[0]) is nn.Sequential


def test_nothing_is_left_when_no_block_is_ever_made() -> None:
    module = Module("nowhere")
    with pytest.raises(ValueError, match="No repeated blocks"):
        fit(module, ActivationOffload())
    assert "configure_model" not in module.__dict__


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fraction": 0.0}, ValueError, "`fraction=0.0` must be above 0"),
        ({"fraction": 1.5}, ValueError, "`fraction=1.5` must be above 0"),
        ({"keep_last": -1}, ValueError, "`keep_last=-1` must not be negative"),
        ({"prefetch": -1}, ValueError, "`prefetch=-1` must not be negative"),
        ({"min_bytes": 1.5}, TypeError, "`min_bytes=1.5` must be an integer"),
        ({"max_host_bytes": True}, TypeError, "`max_host_bytes=True` must be an integer"),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ActivationOffload(**arguments)


@contextmanager
def pretend_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """Let the callback find the simulated device, on which everything is computed meanwhile."""
    device = SimulatedDevice(1)
    original = activation_offload.offload_blocks

    def offload_blocks(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "device": device})

    monkeypatch.setattr(activation_offload, "offload_blocks", offload_blocks)
    with device:
        yield device


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, r"\d+ \(\d+ B\) are smaller than `min_bytes`"),
        ({"min_bytes": 0, "keep_last": 4}, "are in the last blocks, which `keep_last` leaves alone"),
        ({"min_bytes": 0, "keep_last": 0, "max_host_bytes": 0}, "found no room within `max_host_bytes`"),
    ],
    ids=["min_bytes", "keep_last", "max_host_bytes"],
)
@pytest.mark.filterwarnings("ignore:.*host memory:UserWarning")
def test_it_is_said_once_when_nothing_is_moved(
    arguments: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting that keeps everything on the device; and nothing is said where something is moved."""
    with pretend_an_accelerator(monkeypatch), pytest.warns(UserWarning) as said:
        fit(Module(), ActivationOffload(**arguments))
    messages = [str(warning.message) for warning in said if "has no effect" in str(warning.message)]
    assert len(messages) == 1
    assert re.search(f"`ActivationOffload` has no effect: .*{why}", messages[0])
