"""Offload around recomputed blocks: what is moved are the block's inputs, whatever the recomputation keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import AppliedOffload, offload_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice

from .models import MODELS, Adapter, TransformerBlock, batch, build, gradients, same
from .simulated import SimulatedDevice

WIDTH = 8


@contextmanager
def sound(device: SimulatedDevice) -> Iterator[None]:
    """Compute on ``device``, and find every access ordered."""
    with device:
        yield
    device.finish()
    assert device.races == []


def sent(device: SimulatedDevice) -> int:
    return sum(nbytes for way, nbytes in device.copies if way == "out")


class Steps(nn.Module):
    """A block that runs a function."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def twins(function: Callable[[Any, Tensor], Tensor], depth: int = 3) -> tuple[nn.Sequential, nn.Sequential]:
    plain, model = (nn.Sequential(*(Steps(function) for _ in range(depth))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    return plain, model


# Selective recomputation


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offload_first", [True, False])
def test_saved_matmuls_stay_and_the_inputs_of_the_blocks_are_moved(name: str, offload_first: bool) -> None:
    """pytorch/pytorch#158657, #190581: what selective recomputation keeps never meets the hooks. Only that stays."""
    plain, patterns = build(name), MODELS[name][1]
    moved = {}
    for policy in ("full", "save_matmuls"):
        model, device = build(name), SimulatedDevice(3)
        steps = [
            lambda model=model, device=device: offload_blocks(model, patterns, min_bytes=1, keep_last=0, device=device),
            lambda model=model, policy=policy: checkpoint_blocks(model, blocks=patterns, policy=policy),
        ]
        for step in steps if offload_first else reversed(steps):
            step()
        plain.zero_grad()
        for step in range(2):
            plain(batch(step)).square().sum().backward()
            with sound(device):
                model(batch(step)).square().sum().backward()
        assert same(gradients(plain), gradients(model))
        moved[policy] = sent(device)
    assert moved["save_matmuls"] == moved["full"] > 0


def test_checkpoint_blocks_with_offload_takes_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept by a policy is no reason to leave the inputs on the device."""

    def keep_sines(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    for policy in ("full", "save_matmuls", keep_sines):
        plain, model = twins(lambda self, x: self.linear(x).sin() * x)
        device = SimulatedDevice(1)
        monkeypatch.setattr(AcceleratorDevice, "find", lambda device=device: device)
        applied = checkpoint_blocks(model, blocks=Steps, policy=policy, offload=True)
        x = torch.randn(1 << 15, WIDTH)  # 1 MiB, the least that is moved
        plain(x).sum().backward()
        with sound(device):
            model(x).sum().backward()
        assert same(gradients(plain), gradients(model))
        # Three blocks, the last of which keeps its input.
        assert applied.engine.stats()["offloaded_bytes"] == 2 * x.nbytes


@pytest.mark.parametrize("answer", [policy for policy in CheckpointPolicy if "OFFLOAD" in policy.name])
def test_the_policy_that_eager_torch_ignores_is_refused(answer: CheckpointPolicy) -> None:
    """pytorch/pytorch#180874: these answers mean recomputation, in silence."""
    _, model = twins(lambda self, x: self.linear(x))
    device = SimulatedDevice()
    checkpoint_blocks(model, blocks=Steps, policy=lambda *args, **kwargs: answer)
    offload_blocks(model, Steps, min_bytes=1, device=device)
    with device, pytest.raises(ValueError, match="or use `offload=True`"):
        model(torch.randn(2, WIDTH))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x).add_(x).tanh(),
        lambda self, x: torch.relu_(self.linear(x)) * x,
        lambda self, x: self.linear(x).mul_(2).add_(self.linear(x)),
    ],
    ids=["adapter", "activation", "twice"],
)
def test_a_kept_product_that_is_changed_in_place_gives_the_right_gradient(function: Any) -> None:
    """axolotl with adapters: `result += lora(x)` changed the tensor that selective recomputation had kept."""
    plain, model = twins(function)
    device = SimulatedDevice(2)
    checkpoint_blocks(model, blocks=Steps, policy="save_matmuls")
    offload_blocks(model, Steps, min_bytes=1, keep_last=0, device=device)
    x = torch.randn(3, WIDTH)
    plain(x).square().sum().backward()
    with sound(device):
        model(x).square().sum().backward()
    assert same(gradients(plain), gradients(model)) and sent(device) > 0


def test_an_input_that_the_block_changes_in_place_is_autograds_error() -> None:
    """The copy on the host may have been made before or after the change; neither is served."""
    for recompute in (False, True):
        _, model = twins(lambda self, x: self.linear(x * 1).add_(x.mul_(2)), depth=1)
        device = SimulatedDevice(2)
        if recompute:
            checkpoint_blocks(model, blocks=Steps)
        offload_blocks(model, Steps, min_bytes=1, keep_last=0, device=device)
        with device, pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x = torch.randn(3, WIDTH, requires_grad=True).exp()
            end = model(x).sum() if recompute else (model(x) * x.exp()).sum()
            end.backward()


# Checkpoints of the user


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_an_offloaded_block(reentrant: bool) -> None:
    def block(self: Any, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda v: torch.tanh(self.linear(v)), x, use_reentrant=reentrant)
        return inner * x

    plain, model = twins(block)
    device = SimulatedDevice(4)
    offload_blocks(model, Steps, min_bytes=1, keep_last=0, device=device)
    x = torch.randn(3, WIDTH)
    for one, around in ((plain, torch.enable_grad()), (model, sound(device))):
        with around:
            one(x.clone().requires_grad_()).square().sum().backward()
    assert same(gradients(plain), gradients(model))
    # Of each block the input, which the checkpoint shares with the product, and the output of the checkpoint.
    assert [way for way, _ in device.copies].count("out") == 3 * 2


def test_a_reentrant_checkpoint_around_offloaded_blocks() -> None:
    """It recomputes with gradients, so the blocks offload in the backward, where they are needed at once."""
    plain, model = twins(lambda self, x: torch.tanh(self.linear(x)) * x)
    device = SimulatedDevice(4)
    applied = offload_blocks(model, Steps, min_bytes=1, keep_last=0, device=device)
    x = torch.randn(3, WIDTH)
    plain(x.clone().requires_grad_()).square().sum().backward()
    with sound(device):
        end = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().sum()
        assert device.copies == []
        end.backward()
    assert same(gradients(plain), gradients(model))
    assert applied.engine.stats()["live_records"] == 0


# Autocast, and lifetimes


@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
def test_recomputation_and_offload_under_autocast(policy: str) -> None:
    """pytorch/pytorch#141896: the recomputation must meet the types of the forward."""
    plain, model, device = build("LoRA"), build("LoRA"), SimulatedDevice(6)
    checkpoint_blocks(model, blocks="blocks.*", policy=policy)
    offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
    for one, around in ((plain, torch.enable_grad()), (model, sound(device))):
        with around:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                end = one(batch()).float().square().sum()
            end.backward()
    assert same(gradients(plain), gradients(model)) and sent(device) > 0


def shared_through(
    device: SimulatedDevice, keep_last: int
) -> tuple[nn.ModuleList, AppliedOffload, Callable[[], tuple[Tensor, StorageWeakRef]]]:
    """Three recomputed blocks that all get one mask, which the caller lets go after the forward."""
    blocks = nn.ModuleList(TransformerBlock() for _ in range(3))
    checkpoint_blocks(blocks, blocks="*")
    applied = offload_blocks(blocks, "*", min_bytes=1, keep_last=keep_last, device=device)

    def forward() -> tuple[Tensor, StorageWeakRef]:
        mask = torch.zeros(5, 5).sub(0.5)
        x = torch.randn(2, 5, WIDTH, requires_grad=True)
        for block in blocks:
            x = block(x, mask=mask)
        return x, StorageWeakRef(mask.untyped_storage())

    return blocks, applied, forward


def test_a_shared_tensor_that_is_copied_once_is_not_kept_for_that() -> None:
    """huggingface/trl#7193: with one copy for several savers, nobody knew when the one on the device could go."""
    device = SimulatedDevice(1)
    _, applied, forward = shared_through(device, keep_last=0)
    with device:
        end, mask = forward()
        assert applied.engine.stats()["reused_tensors"] == 2
        assert mask.expired(), "gone from the device after the forward"
        end.sum().backward()
        del end
    stats = applied.engine.stats()
    assert stats["arriving_bytes"] == stats["in_flight_bytes"] == stats["live_records"] == 0
    assert stats["reloaded_bytes"] <= stats["offloaded_bytes"]


def test_recomputed_blocks_make_no_cycle() -> None:
    """pytorch/pytorch#154642, #80151: what a checkpoint kept was freed by the collector at best."""
    gc.collect()
    gc.disable()
    try:
        device = SimulatedDevice(1)
        blocks = nn.ModuleList(Adapter() for _ in range(3))
        checkpoint_blocks(blocks, blocks="*")
        applied = offload_blocks(blocks, "*", min_bytes=1, keep_last=1, device=device)
        inputs: list[StorageWeakRef] = []
        for block in blocks:
            block.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
        with device:
            for backward in (False, True):
                x = torch.randn(2, WIDTH)
                for block in blocks:
                    x = block(x)
                if backward:
                    x.sum().backward()
                del x
                applied.engine.drain()
                assert all(storage.expired() for storage in inputs) and len(inputs) > 0
    finally:
        gc.enable()
