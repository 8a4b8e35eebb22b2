"""The callback: when it acts on the model, and that it gives it back."""

import copy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from offload.simulated import SimulatedDevice
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gacp.batchnorm import momentum_in_cycle
from lightning_gacp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.wrapping import layer_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: list[None] = []  # not a number: that would be given back after a recomputation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        return x + torch.tanh(self.linear(x))


class Module(pl.LightningModule):
    """Makes its blocks in ``__init__``, in ``setup`` or in ``configure_model``."""

    def __init__(self, made_in: str = "init", fails: bool = False) -> None:
        super().__init__()
        self.made_in = made_in
        self.fails = fails
        self.batch_size = 2
        self.lr = 0.1
        self.seen: list[tuple[str, bool]] = []
        self.automatic_optimization = True
        self.head = nn.Linear(4, 1)
        self.layers: nn.Module | None = None
        self._make("init")

    def _make(self, where: str) -> None:
        if self.made_in == where and self.layers is None:
            self.layers = nn.Sequential(*[Block() for _ in range(3)])

    def setup(self, stage: str) -> None:
        self._make("setup")

    def configure_model(self) -> None:
        self._make("configure_model")

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def note(self, where: str) -> None:
        self.seen.append((where, layer_of(self.layers[0], "checkpoint") is not None))

    def training_step(self, batch, _):
        self.note("training_step")
        if self.fails:
            raise ZeroDivisionError("in training_step")
        return self.head(self.layers(batch[0])).mean()

    def test_step(self, batch, _):
        self.note("test_step")
        assert self.head(self.layers(batch[0])).shape[1] == 1

    validation_step = test_step

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


def trainer(*callbacks: pl.Callback, **settings: object) -> pl.Trainer:
    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **settings})


@pytest.mark.parametrize("made_in", ["init", "setup", "configure_model"])
def test_applied_before_anything_runs_and_undone_after_the_fit(made_in: str) -> None:
    module = Module(made_in)
    callback = ActivationCheckpointing(every_n_layers=2)
    run = trainer(callback)
    run.fit(module)
    assert module.seen[0] == ("configure_optimizers", True)
    assert all(checkpointed for _, checkpointed in module.seen)
    assert callback.applied is None
    assert all(type(layer) is Block for layer in module.layers)
    assert "setup" not in run.strategy.__dict__
    # 4 batches of the fit, forward and recomputation of the first and the third block; 4 of the validation
    assert [len(layer.calls) for layer in module.layers] == [12, 8, 12]


def test_two_fits_and_a_test_in_between() -> None:
    module = Module()
    callback = ActivationCheckpointing()
    run = trainer(callback)
    run.fit(module)
    module.seen.clear()
    run.test(module, verbose=False)
    assert set(module.seen) == {("test_step", False)}
    module.seen.clear()
    run.fit_loop.max_epochs = 2
    run.fit(module)
    assert ("training_step", True) in module.seen
    assert all(type(layer) is Block for layer in module.layers)


@pytest.mark.parametrize("made_in", ["init", "configure_model"])
def test_undone_after_an_exception(made_in: str) -> None:
    module = Module(made_in, fails=True)
    run = trainer(ActivationCheckpointing())
    with pytest.raises(ZeroDivisionError):
        run.fit(module)
    assert all(type(layer) is Block for layer in module.layers)
    module.fails = False
    run.fit(module)
    assert module.seen[-1][1]
    assert all(type(layer) is Block for layer in module.layers)


def test_an_exception_in_configure_model_leaves_the_strategy_alone() -> None:
    class Broken(Module):
        def configure_model(self) -> None:
            raise ZeroDivisionError

    run = trainer(ActivationCheckpointing())
    with pytest.raises(ZeroDivisionError):
        run.fit(Broken("configure_model"))
    assert "setup" not in run.strategy.__dict__


@pytest.mark.parametrize("made_in", ["init", "configure_model"])
@pytest.mark.parametrize(
    "tuner", [BatchSizeFinder(max_trials=1, steps_per_trial=1), LearningRateFinder(num_training_steps=2)]
)
def test_tuners_measure_the_checkpointed_model(made_in: str, tuner: pl.Callback) -> None:
    """Lightning puts tuner callbacks first, so that what is applied in `on_fit_start` comes too late for them."""
    module = Module(made_in)
    trainer(ActivationCheckpointing(), tuner).fit(module)
    steps = [checkpointed for where, checkpointed in module.seen if where == "training_step"]
    assert len(steps) > 4  # some of them are the tuner's
    assert all(steps)
    assert all(type(layer) is Block for layer in module.layers)


def test_nothing_matched_is_said_at_the_start_of_the_fit() -> None:
    module = Module()
    with pytest.raises(ValueError, match=r"`blocks='Layer'` matches no module of `Module`.*`layers\.\*`: 3 x `Block`"):
        trainer(ActivationCheckpointing(blocks="Layer")).fit(module)
    assert not module.seen


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_layers": 0}, "`every_n_layers=0` must be at least 1"),
        ({"policy": "all"}, "`policy='all'` must be"),
        ({"determinism_check": "maybe"}, "`determinism_check='maybe'` must be one of"),
    ],
)
def test_bad_settings_are_refused_where_they_are_written(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationCheckpointing(**settings)


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.momenta.append(self.norm.momentum) if self.training else None
        return super().forward(self.norm(x))


class NormModule(Module):
    def _make(self, where: str) -> None:
        if where == "init":
            self.layers = nn.Sequential(NormBlock(), NormBlock())
            for layer in self.layers:
                layer.momenta = []


def said_of_batch_norm(caplog: pytest.LogCaptureFixture, *callbacks: pl.Callback, **settings: object) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        trainer(*callbacks, **settings).fit(NormModule())
    return [message for message in caplog.messages if "Batch norm" in message]


@pytest.mark.parametrize("strategy", ["auto", "gacp"])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_batch_norm_under_accumulation_is_named_once(
    strategy: str, checkpointed: bool, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By the callback, with any strategy, or by our strategy where the callback is not."""
    callbacks = [ActivationCheckpointing()] if checkpointed else []
    settings: dict[str, object] = {"accumulate_grad_batches": 2}
    if late:
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))
        settings = {"max_epochs": 2}
    said = said_of_batch_norm(caplog, *callbacks, strategy=strategy, **settings)
    ours = checkpointed or (strategy == "gacp")
    assert len(said) == ours
    if ours:
        assert "sees micro-batches" in said[0]
        assert "`layers.0.norm`, `layers.1.norm`" in said[0]
        assert "scale_batchnorm_momentum=True" in said[0]
    assert not said_of_batch_norm(caplog, *callbacks[:checkpointed], strategy=strategy)


def test_batch_norm_momentum_over_a_cycle_and_a_short_last_one() -> None:
    """4 batches in cycles of 3: the last cycle has one. The recomputation sees what the forward saw."""
    module = NormModule()
    trainer(ActivationCheckpointing(scale_batchnorm_momentum=True), accumulate_grad_batches=3).fit(module)
    cycle = [momentum_in_cycle(0.1, index, 3) for index in range(3)] + [0.1]
    assert module.layers[0].momenta == pytest.approx([momentum for momentum in cycle for _ in range(2)])
    assert module.layers[0].norm.momentum == 0.1
    assert module.layers[0].norm.num_batches_tracked == 4


def test_batch_norm_momentum_after_an_exception() -> None:
    module = NormModule(fails=True)
    with pytest.raises(ZeroDivisionError):
        trainer(ActivationCheckpointing(scale_batchnorm_momentum=True), accumulate_grad_batches=3).fit(module)
    assert module.layers[0].norm.momentum == 0.1


class Weights(pl.Callback):
    """Keeps the weights at the end of the fit, before anything is undone."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


def fitted(*callbacks: pl.Callback, module: pl.LightningModule, **settings: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weights = Weights()
    trainer(*callbacks, weights, **settings).fit(module)
    return weights.state


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_fit_is_bit_equal(offload: bool, precision: str) -> None:
    """Offload finds no accelerator here and changes nothing; on one, its own tests apply."""
    module = NormModule()
    start = copy.deepcopy(module)
    callback = ActivationCheckpointing(offload=offload)
    found = fitted(callback, module=module, precision=precision, accumulate_grad_batches=2)
    expected = fitted(module=start, precision=precision, accumulate_grad_batches=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:You.re using the WeightAveraging callback with a model that overrides")
def test_weight_averaging_averages_the_copys_own_weights() -> None:
    """It deep-copies the module after it was checkpointed."""
    results = []
    for callbacks in ([ActivationCheckpointing()], []):
        torch.manual_seed(0)
        module = Module()
        averaging = EMAWeightAveraging(decay=0.5)
        found = fitted(*callbacks, averaging, module=module)
        results.append((found, module.state_dict()))
    for found, expected in zip(*results, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_checkpoint_files_load_with_and_without(tmp_path: Path) -> None:
    callback = ActivationCheckpointing()
    run = trainer(callback, SaveInFit(tmp_path))
    module = Module()
    run.fit(module)
    plain = Module.load_from_checkpoint(tmp_path / "in_fit.ckpt")
    assert all(type(layer) is Block for layer in plain.layers)
    assert "lightning_gacp" not in str(torch.load(tmp_path / "in_fit.ckpt", weights_only=True)["state_dict"].keys())
    resumed = Module()
    trainer(ActivationCheckpointing(), max_epochs=2).fit(resumed, ckpt_path=tmp_path / "in_fit.ckpt", weights_only=True)
    assert ("training_step", True) in resumed.seen
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(whole(x), plain.layers(x))


class SaveInFit(pl.Callback):
    """Saves a checkpoint, and the layers as a whole, while they are checkpointed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "in_fit.ckpt")
            torch.save(pl_module.layers, self.folder / "whole.pt")


def said(record: pytest.WarningsRecorder) -> list[str]:
    return [text for warning in record if "LeafSpec" not in (text := str(warning.message))]  # torch's own


def test_a_number_of_layers_past_the_last_is_said() -> None:
    """Three blocks: every fifth is only the first."""
    with pytest.warns(UserWarning, match=r"`every_n_layers=5` is more than there are blocks in a row \(3\)") as record:
        trainer(ActivationCheckpointing(every_n_layers=5)).fit(Module())
    assert len(said(record)) == 1
    trainer(ActivationCheckpointing(every_n_layers=3)).fit(Module())  # warnings are errors


def test_blocks_in_evaluation_mode_are_said_once() -> None:
    """They keep what they save: recomputation acts on blocks that are trained."""

    class Frozen(Module):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            self.layers[0].eval()
            self.layers[2].eval()

    module = Frozen()
    with pytest.warns(UserWarning, match="2 of 3 checkpointed blocks are in evaluation mode") as record:
        trainer(ActivationCheckpointing()).fit(module)
    assert len(said(record)) == 1
    assert "`layers.0`, `layers.2`. Write `.train()`" in said(record)[0]
    steps = [where for where, _ in module.seen].count("training_step")
    assert len(module.layers[1].calls) - len(module.layers[0].calls) == steps > 0


@pytest.mark.parametrize(
    ("module", "length", "words"),
    [(Module, 3, "the model has no batch norm"), (None, 1, "without accumulation")],
    ids=["no batch norm", "no accumulation"],
)
def test_momentum_that_has_nothing_to_scale_is_said(module: type[Module] | None, length: int, words: str) -> None:
    callback = ActivationCheckpointing(scale_batchnorm_momentum=True)
    with pytest.warns(UserWarning, match=f"`scale_batchnorm_momentum=True` has no effect.*{words}") as record:
        trainer(callback, accumulate_grad_batches=length).fit((module or NormModule)())
    assert len(said(record)) == 1


def test_offload_that_moves_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the blocks are small here. Where there is no accelerator, other words have said it."""
    device = SimulatedDevice(1)
    monkeypatch.setattr(AcceleratorDevice, "find", lambda: device)
    with device, pytest.warns(UserWarning, match="`offload=True` has no effect.* smaller than `min_bytes`") as record:
        trainer(ActivationCheckpointing(offload=True)).fit(Module())
    assert len(said(record)) == 1
    monkeypatch.setattr(AcceleratorDevice, "find", lambda: None)
    trainer(ActivationCheckpointing(offload=True)).fit(Module())
