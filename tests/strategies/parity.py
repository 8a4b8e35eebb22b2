"""Two runs of one module, with Lightning's strategy and with ours, and everything that can be seen of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gacp.strategies.gates import GACPOptimizer
from strategies.models import quiet_trainer

CALLBACK_HOOKS = [name for name, member in vars(Callback).items() if inspect.isfunction(member) and name[0] != "_"]
# What is no hook of the fit loop, or is wanted in the answer: not overridden by the recording module.
_NOT_RECORDED = {
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "prepare_data"),
    *("configure_model", "configure_sharded_model"),  # either of them, not both
}
MODULE_HOOKS = [
    name
    for hooks in (ModelHooks, DataHooks, CheckpointHooks)
    for name, member in vars(hooks).items()
    if inspect.isfunction(member) and name[0] != "_" and name not in _NOT_RECORDED
]


def shown(value: Any) -> Any:
    """A value in a form that can be compared between runs."""
    if isinstance(value, Tensor):
        return (str(value.dtype), str(value.detach().tolist()))  # as text: NaN equals itself
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return shown(vars(value))
    if isinstance(value, (int, float, str, bool, type(None), torch.device, torch.dtype)):
        return value
    if isinstance(value, GACPOptimizer):
        return "LightningOptimizer"
    return type(value).__name__


class Tape:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def note(self, who: str, name: str, values: Any, gradients: Any = None) -> None:
        self.events.append((who, name, shown(values), shown(gradients)))


class RecordingCallback(Callback):
    """Every hook of a callback."""

    def __init__(self, tape: Tape, trainer_state: bool = True) -> None:
        self.tape = tape
        self.trainer_state = trainer_state


def _record_callback(name: str) -> Callable[..., Any]:
    def hook(self: RecordingCallback, *args: Any, **kwargs: Any) -> Any:
        values: list[Any] = [args[2:] if name not in ("state_dict", "load_state_dict") else ()]
        trainer = args[0] if args and isinstance(args[0], Trainer) else None
        if trainer is not None and self.trainer_state:
            values.append((trainer.global_step, trainer.current_epoch, trainer.callback_metrics))
        module = args[1] if len(args) > 1 and isinstance(args[1], LightningModule) else None
        gradients = None
        if module is not None and name in ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"):
            gradients = [parameter.grad for parameter in module.parameters()]
        self.tape.note("callback", name, values, gradients)
        return getattr(Callback, name)(self, *args, **kwargs)

    return hook


for _name in CALLBACK_HOOKS:
    if _name not in ("on_save_checkpoint", "state_key"):
        setattr(RecordingCallback, _name, _record_callback(_name))


def _record_module(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.tape.note("module", name, args if "checkpoint" not in name else ())
        return getattr(super(RecordingHooks, self), name)(*args, **kwargs)

    return hook


class RecordingHooks(LightningModule):
    """Every hook of a module; mixed in before the module's own class."""

    tape: Tape


for _name in MODULE_HOOKS:
    setattr(RecordingHooks, _name, _record_module(_name))


class ListLogger(Logger):
    """Keeps what is logged, with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name = "list"
    version = 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@dataclasses.dataclass
class Seen:
    """Everything that can be seen of a run."""

    weights: dict[str, Tensor]
    events: list[Any]
    rows: list[Any]
    metrics: Any
    steps: int
    states: list[Any]
    checkpoint: Path | None = None


def plain(value: Any) -> Any:
    """States with tensors as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def run(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Any],
    strategy: Any,
    record: bool = True,
    checkpoint: Path | None = None,
    resume: Path | None = None,
    val_data: Any = None,
    **trainer_kwargs: Any,
) -> Seen:
    """Trains a fresh module; ``record`` gives it and a callback every hook there is."""
    torch.manual_seed(3)
    module = make_module()
    tape = Tape()
    callbacks = list(trainer_kwargs.pop("callbacks", []))
    if record:
        module.__class__ = type(type(module).__name__, (RecordingHooks, type(module)), {})
        module.tape = tape
        callbacks.append(RecordingCallback(tape))
    logger = ListLogger()
    trainer = quiet_trainer(
        strategy=strategy,
        **{"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "callbacks": callbacks, **trainer_kwargs},
    )
    trainer.fit(module, make_data(), val_data, ckpt_path=resume)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)
    return Seen(
        {name: value.detach().clone() for name, value in module.state_dict().items()},
        tape.events,
        logger.rows,
        shown(trainer.callback_metrics),
        trainer.global_step,
        plain([optimizer.state_dict() for optimizer in trainer.optimizers])
        + plain([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        checkpoint,
    )


def assert_same(theirs: Seen, ours: Seen) -> None:
    """Bit for bit, hook for hook."""
    for i, (a, b) in enumerate(zip(theirs.events, ours.events, strict=False)):
        assert a == b, f"event {i}: Lightning {a}\nours {b}\nbefore: {[e[:2] for e in ours.events[max(i - 5, 0) : i]]}"
    assert len(theirs.events) == len(ours.events)
    assert theirs.weights.keys() == ours.weights.keys()
    for name, value in theirs.weights.items():
        assert torch.equal(value, ours.weights[name]), name
    assert theirs.rows == ours.rows
    assert theirs.metrics == ours.metrics
    assert theirs.steps == ours.steps
    assert theirs.states == ours.states


class Small(LightningModule):
    """A regression whose training, validation and logging the scenarios change."""

    manual = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.other = nn.Linear(2, 1)
        self.automatic_optimization = not self.manual

    def loss(self, batch: Any) -> Tensor:
        x, y = _pair(batch)
        out = self.net(x)
        return nn.functional.mse_loss(self.other(out).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def sub_optimizers(self) -> tuple[Optimizer, Optimizer]:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.Adam(self.other.parameters(), lr=0.01)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, dict):
        return batch["x"], batch["y"]
    if dataclasses.is_dataclass(batch):
        return batch.x, batch.y  # type: ignore[attr-defined]
    return batch[0], batch[1]


def pairs(batches: int = 5, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 3, generator=generator), torch.randn(size, generator=generator)) for _ in range(batches)]
