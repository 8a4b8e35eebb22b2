"""`checkpoint_blocks(offload=True)`: what it hands to the offload engine."""

import copy
import logging

import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import nn

import lightning_gacp.offload
from checkpointing.models import LM, MLPBlock, assert_equal, train
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.wrapping import layer_of

TOKENS = [torch.arange(12).view(3, 4) % 11]
MIB = 1 << 20


class ByKeyword(nn.Module):
    """Takes everything by keyword, also what Hugging Face's offload leaves on the device for that reason."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale() for _ in range(4)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(hidden_states=x, attention_mask=mask)
        return x.square().mean()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden_states)) * attention_mask


def test_keyword_tensors_are_offloaded_and_a_shared_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, the last of which keeps its input: three inputs of 1 MiB, and one mask for all."""
    device = SimulatedDevice()
    monkeypatch.setattr(AcceleratorDevice, "find", lambda: device)
    plain = ByKeyword()
    model = copy.deepcopy(plain)
    applied = checkpoint_blocks(model, offload=True)
    x, mask = torch.randn(1024, 256), torch.rand(1024, 256)
    with device:
        x_there, mask_there = x.clone(), mask.clone()
        model(x_there, mask_there).backward()
    stats = applied.engine.stats()
    assert stats["offloaded_bytes"] == 4 * MIB
    assert stats["offloaded_tensors"] == 4
    assert stats["reused_tensors"] == 2
    assert stats["live_records"] == 0
    plain(x, mask).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_without_an_accelerator_nothing_changes_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face's crashes here."""
    plain = LM(MLPBlock, 3)
    model = copy.deepcopy(plain)
    with caplog.at_level(logging.WARNING, logger="lightning_gacp"):
        applied = checkpoint_blocks(model, offload=True)
    assert len(caplog.messages) == 1
    assert not applied.engine.stats()["active"]
    assert_equal(train(model, TOKENS), train(plain, TOKENS))
    applied.remove()
    assert all(type(layer) is MLPBlock for layer in model.layers)


def test_without_offload_there_is_no_engine() -> None:
    assert checkpoint_blocks(LM(MLPBlock, 2)).engine is None


def test_a_failing_offload_undoes_the_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lightning_gacp.offload, "offload_selected", fail)
    model = LM(MLPBlock, 2)
    with pytest.raises(ZeroDivisionError):
        checkpoint_blocks(model, offload=True)
    assert all(type(layer) is MLPBlock for layer in model.layers)


def test_removal_takes_both_roles_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorDevice, "find", SimulatedDevice)
    model = LM(MLPBlock, 2)
    applied = checkpoint_blocks(model, offload=True)
    assert all(layer_of(layer, role) is not None for layer in model.layers for role in ("checkpoint", "offload"))
    applied.remove()
    assert all(type(layer) is MLPBlock for layer in model.layers)
