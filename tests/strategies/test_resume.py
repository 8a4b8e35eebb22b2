"""One device: a run that is cut at any micro-batch and resumed ends bit-equal to one that was never cut."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from tests.strategies import resuming
from tests.strategies.models import big_batch_gradients, make_net
from tests.strategies.resuming import (
    CYCLE,
    LENGTHS,
    Cut,
    Learner,
    SaveAndCut,
    SaveOnException,
    StatefulLoader,
    ToldLearner,
    TwoPlayers,
    UnsizedLoader,
    batches,
    same,
    state_of,
    strategy,
    train,
)

MODULES = [
    pytest.param(Learner, False, id="automatic"),
    pytest.param(Learner, True, id="manual"),
    pytest.param(TwoPlayers, True, id="two optimizers"),
    pytest.param(ToldLearner, False, id="look-ahead"),
    pytest.param(ToldLearner, True, id="look-ahead by hand"),
]
LOADERS = [pytest.param(StatefulLoader, id="sized"), pytest.param(UnsizedLoader, id="unsized")]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("make", "manual"), MODULES)
def test_cut_after_every_micro_batch(make, manual, loader, tmp_path):
    """Two epochs of 11 micro-batches in cycles of 4, 4 and 3: every index of the first epoch and of two cycles more."""
    whole = make(manual)
    steps = train(whole, loader(batches())).global_step
    for at in range(1, len(LENGTHS) + 2 * CYCLE + 1):
        if loader is UnsizedLoader and at == len(LENGTHS):
            # Lightning resumes with the position of the epoch that has ended, where it does not know the length.
            continue
        path = tmp_path / f"{at}.ckpt"
        train(make(manual), loader(batches()), SaveAndCut(at, path))
        resumed = make(manual)
        trainer = train(resumed, loader(batches()), path=path)
        assert same(state_of(resumed), state_of(whole)), at
        assert trainer.global_step == steps
        assert trainer.strategy.lost_micro_batches == 0


@pytest.mark.parametrize(("make", "manual"), MODULES)
def test_resumed_again_and_again(make, manual, tmp_path):
    """Cut after each micro-batch of two cycles, one process after the other."""
    whole = make(manual)
    train(whole, StatefulLoader(batches()), max_epochs=1)
    path = None
    for at in range(1, 2 * CYCLE + 1):
        module = make(manual)
        train(module, StatefulLoader(batches()), SaveAndCut(1, tmp_path / f"{at}.ckpt"), path=path, max_epochs=1)
        path = tmp_path / f"{at}.ckpt"
    resumed = make(manual)
    train(resumed, StatefulLoader(batches()), path=path, max_epochs=1)
    assert same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("at", [2, 3, 5])
def test_written_in_a_validation_inside_a_cycle(manual, at, tmp_path):
    class Validated(Learner):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch))

    data = StatefulLoader(batches())

    def run(*callbacks: Callback, path=None):
        module = Validated(manual)
        made = resuming.quiet_trainer(
            strategy=strategy(), callbacks=list(callbacks), max_epochs=1, val_check_interval=1, num_sanity_val_steps=0
        )
        val = torch.utils.data.DataLoader(batches(1)[3:4], batch_size=None)  # type: ignore[arg-type]
        with suppress(Cut):
            made.fit(module, data, val, ckpt_path=path)
        return module

    whole = run()
    run(SaveAndCut(at, tmp_path / "c.ckpt", hook="on_validation_end"))
    assert same(state_of(run(path=tmp_path / "c.ckpt")), state_of(whole))


@pytest.mark.parametrize("manual", [False, True])
def test_an_exception_before_the_backward_keeps_the_cycle(manual, tmp_path):
    """The micro-batch in which it comes was fetched and not trained on: the loader yields it once more."""

    class Fails(Learner):
        def __init__(self, at: int) -> None:
            super().__init__(manual)
            self.at = at

        def loss(self, batch):
            self.at -= 1
            if self.at == 0:
                raise Cut
            return super().loss(batch)

    whole = Fails(0)
    train(whole, StatefulLoader(batches()), max_epochs=1)
    for at in (2, 3, 4, 7):
        train(Fails(at), StatefulLoader(batches()), SaveOnException(tmp_path / f"{at}.ckpt"), max_epochs=1)
        resumed = Fails(0)
        trainer = train(resumed, StatefulLoader(batches()), path=tmp_path / f"{at}.ckpt", max_epochs=1)
        assert same(state_of(resumed), state_of(whole))
        assert trainer.strategy.lost_micro_batches == 0


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("at", [3, 4, 5, 7])
def test_an_exception_in_a_callback_before_the_micro_batch_keeps_the_cycle(at, manual, tmp_path):
    """Callbacks come before the strategy, whose books are still at the last micro-batch."""

    class Fails(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == at:
                raise Cut

    whole, resumed, path = Learner(manual), Learner(manual), tmp_path / "c.ckpt"
    train(whole, StatefulLoader(batches()), max_epochs=1)
    train(Learner(manual), StatefulLoader(batches()), Fails(), SaveOnException(path), max_epochs=1)
    trainer = train(resumed, StatefulLoader(batches()), path=path, max_epochs=1)
    assert same(state_of(resumed), state_of(whole))
    assert trainer.strategy.lost_micro_batches == 0


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("lost", [3, 4])
def test_an_exception_in_mid_backward_is_said_to_lose_the_cycle(lost, manual, tmp_path):
    """In the second cycle, in its last micro-batch and in the one before. (The third micro-batch runs no backward.)"""

    class Fails(Learner):
        calls = 0

        def on_after_backward(self):
            self.calls += 1
            if self.calls == lost + 3:
                raise Cut

    with pytest.warns(UserWarning, match=rf"{lost} micro-batches were lost: `Cut` interrupted"):
        train(Fails(manual), StatefulLoader(batches()), SaveOnException(tmp_path / "c.ckpt"))
    resumed = Fails(manual)
    resumed.calls = 10
    why = "the checkpoint was written while a micro-batch of the cycle was running"
    with pytest.warns(UserWarning, match=rf"{lost - 1} micro-batches were lost: {why}"):
        trainer = train(resumed, StatefulLoader(batches()), path=tmp_path / "c.ckpt")
    # The one that was interrupted is fetched and trained on again.
    assert trainer.strategy.lost_micro_batches == lost - 1


def test_a_checkpoint_between_the_step_and_the_end_of_its_micro_batch(tmp_path):
    """Nothing of the cycle is lost: it was stepped with. Its last micro-batch is run again, and that is said."""

    class Saves(Learner):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if batch_idx == 2 * CYCLE - 1 and self.trainer.ckpt_path is None:
                self.trainer.save_checkpoint(tmp_path / "c.ckpt")
                raise Cut

    assert train(Saves(True), StatefulLoader(batches()), max_epochs=1).strategy.lost_micro_batches == 0
    with pytest.warns(UserWarning, match="trained on once more, in a step of its own") as said:
        trainer = train(Saves(True), StatefulLoader(batches()), path=tmp_path / "c.ckpt", max_epochs=1)
    assert not [warning for warning in said if "lost" in str(warning.message)]
    assert trainer.strategy.lost_micro_batches == 0
    assert trainer.global_step == 3 + 1


def test_gradients_scaled_for_fp16_are_restored_to_the_scale_of_the_resumed_run(tmp_path):
    """The scale is part of the checkpoint; a run without a scaler takes it out."""

    def run(*callbacks, path=None):
        module = Learner()
        half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        train(module, StatefulLoader(batches()), *callbacks, path=path, max_epochs=1, plugins=half)
        return module

    whole = run()
    run(SaveAndCut(6, tmp_path / "c.ckpt"))
    assert same(state_of(run(path=tmp_path / "c.ckpt")), state_of(whole))

    checkpoint = torch.load(tmp_path / "c.ckpt", weights_only=False)
    assert checkpoint["lightning_gacp"]["cycle"]["scale"] == 2.0**16
    found = []

    class First(Callback):
        def on_train_batch_start(self, trainer, module, *args):
            found.append([p.grad.clone() for p in module.parameters()])
            raise Cut

    with pytest.warns(UserWarning, match="2 micro-batches were lost: `Cut` interrupted"):
        train(Learner(), StatefulLoader(batches()), First(), path=tmp_path / "c.ckpt", max_epochs=1)
    gathered = checkpoint["lightning_gacp"]["cycle"]["gradients"].values()
    assert same(found[0], [gradient / 2**16 for gradient in gathered])


def test_accumulated_dtype_is_kept(tmp_path):
    class Half(Learner):
        def __init__(self) -> None:
            super().__init__(dtype=torch.bfloat16)

    def using():
        return strategy(grad_dtype="float32")

    whole = Half()
    train(whole, StatefulLoader(batches()), using=using)
    train(Half(), StatefulLoader(batches()), SaveAndCut(6, tmp_path / "c.ckpt"), using=using)
    carried = torch.load(tmp_path / "c.ckpt", weights_only=True)["lightning_gacp"]["cycle"]["gradients"]
    assert {gradient.dtype for gradient in carried.values()} == {torch.float32}
    resumed = Half()
    train(resumed, StatefulLoader(batches()), path=tmp_path / "c.ckpt", using=using)
    assert same(state_of(resumed), state_of(whole))


# ---------------------------------------------------------------- the file


def test_what_is_in_the_file(tmp_path):
    """Nothing but numbers and tensors, and no more bytes than the gradients; outside a cycle a few numbers."""
    module = Learner()
    train(module, StatefulLoader(batches()), SaveAndCut(6, tmp_path / "inside.ckpt"))
    inside = torch.load(tmp_path / "inside.ckpt", weights_only=True)["lightning_gacp"]
    tensors = [value for kind in ("gradients", "aside") for value in inside["cycle"][kind].values()]
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert sum(t.numel() * t.element_size() for t in tensors) == weights
    assert inside["cycle"]["micro_batches"] == 2 and inside["cycle"]["items"] == LENGTHS[4] + LENGTHS[5]

    train(Learner(True), StatefulLoader(batches()), SaveAndCut(6, tmp_path / "manual.ckpt"))
    cycle = torch.load(tmp_path / "manual.ckpt", weights_only=True)["lightning_gacp"]["cycle"]
    assert cycle["gradients"] == {}
    assert sum(t.numel() * t.element_size() for t in cycle["aside"].values()) == weights

    train(Learner(), StatefulLoader(batches()), SaveAndCut(8, tmp_path / "between.ckpt"))
    between = torch.load(tmp_path / "between.ckpt", weights_only=True)["lightning_gacp"]
    assert between == {"version": 1, "cycles": 2, "lost_micro_batches": 0, "epoch": 1, "ready": 8}


def test_weights_only_checkpoints_have_nothing_of_it(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)

    train(Learner(), StatefulLoader(batches()), Saves())
    assert "lightning_gacp" not in torch.load(tmp_path / "w.ckpt", weights_only=False)


@pytest.mark.parametrize("manual", [False, True])
def test_plain_lightning_loads_ours(manual, tmp_path):
    """It trains on from the position, without the gradients that it knows nothing of."""
    train(Learner(manual), StatefulLoader(batches()), SaveAndCut(6, tmp_path / "c.ckpt"))
    plain = Learner(manual)
    options = {} if manual else {"accumulate_grad_batches": CYCLE}
    trainer = train(plain, StatefulLoader(batches()), path=tmp_path / "c.ckpt", using=lambda: "auto", **options)
    assert type(trainer.strategy) is SingleDeviceStrategy
    assert trainer.current_epoch == 2


def test_ours_loads_plain_lightnings(tmp_path):
    """At the end of a cycle nothing is missing. Inside one it says how much is."""
    plain = {"using": lambda: "auto", "accumulate_grad_batches": CYCLE}

    class Equal(Learner):
        """A mean of means is what plain Lightning makes of it: batches of one size are exact there too."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)
            with torch.no_grad():
                self.net.weight.fill_(0.1)
                self.net.bias.fill_(0.2)

        def loss(self, batch):
            return self.net(batch).square().mean()

    data = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    whole = Equal()
    train(whole, StatefulLoader(data), using=lambda: strategy(num_items=None))
    for at, lost in ((4, 0), (6, 2)):
        path = tmp_path / f"{at}.ckpt"
        train(Equal(), StatefulLoader(data), SaveAndCut(at, path), **plain)
        resumed = Equal()

        def go(resumed=resumed, path=path):
            return train(resumed, StatefulLoader(data), path=path, using=lambda: strategy(num_items=None))

        if lost:
            with pytest.warns(UserWarning, match=r"2 micro-batches were lost: .* inside a cycle, without this package"):
                trainer = go()
        else:
            trainer = go()
            for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert trainer.strategy.lost_micro_batches == lost


def test_a_checkpoint_at_the_start_of_a_resumed_run_passes_the_cycle_on(tmp_path):
    whole = Learner()
    train(whole, StatefulLoader(batches()))
    train(Learner(), StatefulLoader(batches()), SaveAndCut(6, tmp_path / "a.ckpt"))
    again = SaveAndCut(1, tmp_path / "b.ckpt", hook="on_train_start")
    train(Learner(), StatefulLoader(batches()), again, path=tmp_path / "a.ckpt")
    resumed = Learner()
    train(resumed, StatefulLoader(batches()), path=tmp_path / "b.ckpt")
    assert same(state_of(resumed), state_of(whole))


# ---------------------------------------------------------------- what cannot be continued is said


def cut_inside(tmp_path, at=6, **kwargs):
    path = tmp_path / "c.ckpt"
    train(Learner(), StatefulLoader(batches()), SaveAndCut(at, path), **kwargs)
    return path


def test_a_longer_cycle_takes_it_in(tmp_path):
    """Cycles of 4, resumed in cycles of 5: micro-batches 5 to 10 make one step, exactly weighted."""
    path = cut_inside(tmp_path, at=6)
    seen = []

    class Watches(Learner):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in self.net.parameters()])

    before = make_net()
    before.load_state_dict({k[4:]: v for k, v in torch.load(path, weights_only=False)["state_dict"].items()})
    trainer = train(Watches(), StatefulLoader(batches()), path=path, using=lambda: strategy(accumulate_grad_batches=5))
    expected = big_batch_gradients(before, batches()[4:10])
    for found, wanted in zip(seen[0], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert trainer.strategy.lost_micro_batches == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accumulate_grad_batches": 3}, "was longer than one of 3 micro-batches"),
        ({"loss_reduction": "sum"}, "of another `loss_reduction`"),
    ],
)
def test_what_does_not_fit_is_lost_with_a_warning(options, why, tmp_path):
    path = cut_inside(tmp_path)
    with pytest.warns(UserWarning, match=f"2 micro-batches were lost: .*{why}"):
        trainer = train(Learner(), StatefulLoader(batches()), path=path, using=lambda: strategy(**options))
    assert trainer.strategy.lost_micro_batches == 2


def test_a_second_fit_without_a_checkpoint_starts_clean(tmp_path):
    """What a resumed fit has restored is not restored once more."""
    path = cut_inside(tmp_path)
    trainer = train(Learner(), StatefulLoader(batches()), path=path, max_epochs=1)
    found, expected = Learner(), Learner()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.epoch_loop.batch_progress.reset()
    trainer.fit_loop.max_epochs = 1
    trainer.fit(found, StatefulLoader(batches()))
    train(expected, StatefulLoader(batches()), max_epochs=1)
    assert same(state_of(found), state_of(expected))
