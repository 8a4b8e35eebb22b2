"""`OOMAdvice`: the phase, the settings and their predicted savings, with errors thrown on purpose."""

from __future__ import annotations

import re
import sys
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_gacp as gacp
from lightning_gacp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_gacp.callbacks.oom_advice import OOMAdvice, is_out_of_memory
from lightning_gacp.callbacks.saved_bytes import SavedBytes
from lightning_gacp.checkpointing import checkpoint_blocks

ROWS = 6


class Model(L.LightningModule):
    """Runs out of memory in the phase that it is told."""

    def __init__(self, phase: str = "", error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.phase, self.error = phase, error
        blocks = [nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(4)]
        self.net = nn.Sequential(*blocks)

    def fail_in(self, phase: str) -> None:
        if phase == self.phase:
            raise self.error("out of memory, on purpose")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.fail_in("forward")
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.fail_in("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail_in("step")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fail_in("validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def note(module: Model, rows: int = ROWS, callbacks: tuple[Any, ...] = (), **settings: Any) -> str:
    data = DataLoader([torch.randn(rows, 4) for _ in range(4)], batch_size=None)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        strategy=gacp.GACPStrategy(accumulate_grad_batches=2, num_items="samples", **settings),
        callbacks=[*callbacks, OOMAdvice()],
    )
    with pytest.raises(module.error) as raised:
        trainer.fit(module, data, data)
    return "\n".join(getattr(raised.value, "__notes__", []))


def saved(module: Model, every_n_layers: int | None) -> int:
    """The bytes that a forward really saves."""
    batch = torch.randn(ROWS, 4)
    applied = None if every_n_layers is None else checkpoint_blocks(module.net, every_n_layers)
    with SavedBytes([*module.parameters(), batch]) as counter:
        loss = module.net(batch)
    if applied is not None:
        applied.remove()
    del loss
    return counter.total


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")


def test_advice_comes_in_order_of_cost_with_what_it_saves() -> None:
    """The predictions of recomputation are the differences that a forward with and without really shows."""
    module = Model("forward")
    text = note(module)
    assert "memory ran out in the forward" in text
    titles = re.findall(r"^\d\. (\w+ \w+ \w+)", text, re.MULTILINE)
    assert titles == ["halve the micro", "recompute every second", "recompute every block"]
    for every_n_layers in (2, 1):
        difference = saved(module, None) - saved(module, every_n_layers)
        assert f"saves about {difference / 1024:.1f} KiB:\n     trainer:" in text
    assert "accumulate_grad_batches: 4" in text
    assert "batch_size: 3}  # your own argument; it was 6" in text


def test_every_piece_of_yaml_is_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the note tells to write can be written: LightningCLI takes it."""
    monkeypatch.setattr(sys, "argv", ["example"])
    snippets = re.findall(r"^     trainer:\n(?:^      .*\n?)+", note(Model("forward"), rows=1), re.MULTILINE)
    assert len(snippets) == 2
    for snippet in snippets:
        values = yaml.safe_load(re.sub("^     ", "", snippet, flags=re.MULTILINE))
        configured = {"seed_everything": 1, "trainer": {"accelerator": "cpu", "logger": False, **values["trainer"]}}
        trainer = LightningCLI(Model, run=False, args=configured).trainer
        assert any(isinstance(callback, ActivationCheckpointing) for callback in trainer.callbacks)


def test_what_is_done_already_is_not_advised() -> None:
    text = note(Model("forward"), rows=1, callbacks=(ActivationCheckpointing(),), free_gradients=False)
    assert "recompute every" not in text
    assert "halve" not in text  # one row cannot be halved
    gradients = 4 * sum(parameter.numel() for parameter in Model().parameters())
    assert f"saves about {gradients / 1024:.1f} KiB:\n     trainer:\n       strategy:" in text
    assert "free_gradients: true" in text


@pytest.mark.parametrize(
    ("phase", "words"),
    [("backward", "the backward"), ("step", "the optimizer step"), ("validation", "validation")],
)
def test_the_phase_is_named(phase: str, words: str) -> None:
    text = note(Model(phase))
    assert f"memory ran out in {words}. What to change" in text
    assert ("foreach: false" in text.split("2. ")[0]) == (phase == "step")
    assert ("strategy: gacp_fsdp" in text) == (phase == "step")


def test_a_back_ends_own_error_counts_too() -> None:
    assert "memory ran out" in note(Model("forward", RuntimeError))
    assert is_out_of_memory(RuntimeError("HIP out of memory. Tried to allocate"))
    with pytest.raises(RuntimeError) as of_the_cpu:
        torch.empty(1 << 62, dtype=torch.uint8)  # more than there are addresses
    assert is_out_of_memory(of_the_cpu.value)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_other_errors_are_left_alone() -> None:
    class Other(Model):
        def fail_in(self, phase: str) -> None:
            raise ValueError("something else")

    module = Other()
    module.error = ValueError
    assert note(module) == ""
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_a_model_without_blocks_gets_advice_as_well() -> None:
    class Flat(Model):
        def __init__(self) -> None:
            super().__init__("forward")
            self.net = nn.Linear(4, 4)  # type: ignore[assignment]

    text = note(Flat())
    assert "halve the micro-batch" in text
    assert "unknown amount" in text
    assert "recompute" not in text


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_outside_of_a_fit(what: str) -> None:
    """No backward, nothing to recompute: smaller batches of that loader, or half the precision."""
    words = {"validate": "validation", "test": "the test", "predict": "prediction"}[what]

    class Evaluated(Model):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.fail_in("validation")

        def predict_step(self, batch: Tensor, batch_idx: int) -> None:
            self.fail_in("validation")

    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[OOMAdvice()], strategy="gacp"
    )
    data = DataLoader([torch.randn(2, 4)], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        getattr(trainer, what)(Evaluated("validation"), data)
    text = raised.value.__notes__[0]
    assert f"memory ran out in {words}. What to change" in text
    assert re.findall(r"^\d\. (.*); saves", text, re.MULTILINE) == [
        f"use smaller batches in `{what[:3] if what == 'validate' else what}_dataloader`",
        "compute in bfloat16 (other rounding)",
    ]
