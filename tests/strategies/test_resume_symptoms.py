"""Symptoms of resumption that others have reported, each named after what was seen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.strategies.models import big_batch_gradients, make_net, ragged_batches
from tests.strategies.resuming import (
    LENGTHS,
    Learner,
    SaveAndCut,
    StatefulLoader,
    batches,
    same,
    state_of,
    strategy,
    train,
)


@pytest.mark.parametrize(("manual", "ours"), [(False, True), (True, True), (False, False)])
def test_resuming_with_a_schedule_of_cycle_lengths(manual, ours, tmp_path):
    """lightning 5334: a resumed run crashed, or went on with the length of the first epoch."""
    schedule = {0: 1, 1: 4}
    data = ragged_batches([length or 2 for length in LENGTHS])  # one without items would make no step of its own

    def run(*callbacks, path=None):
        module = Learner(manual)
        scheduler = [] if ours else [GradientAccumulationScheduler(schedule)]
        using = partial(strategy, accumulate_grad_batches=schedule if ours else None)
        trainer = train(module, StatefulLoader(data), *scheduler, *callbacks, path=path, using=using)
        return trainer.global_step, state_of(module)

    steps, whole = run()
    assert steps == len(LENGTHS) + 3
    for at in (4, len(LENGTHS), len(LENGTHS) + 1, len(LENGTHS) + 2, len(LENGTHS) + 5):
        run(SaveAndCut(at, tmp_path / f"{at}.ckpt"))
        steps_resumed, resumed = run(path=tmp_path / f"{at}.ckpt")
        assert same(resumed, whole), at
        assert steps_resumed == steps


@pytest.mark.parametrize("manual", [False, True])
def test_max_steps_of_a_resumed_run(manual, tmp_path):
    """lightning 19684: `max_steps` was off where epochs end with short cycles."""
    whole = Learner(manual)
    assert train(whole, StatefulLoader(batches()), max_steps=5, max_epochs=-1).global_step == 5
    train(Learner(manual), StatefulLoader(batches()), SaveAndCut(13, tmp_path / "c.ckpt"), max_steps=5, max_epochs=-1)
    resumed = Learner(manual)
    trainer = train(resumed, StatefulLoader(batches()), path=tmp_path / "c.ckpt", max_steps=5, max_epochs=-1)
    assert trainer.global_step == 5
    assert same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize("manual", [False, True])
def test_first_update_after_resuming_inside_a_cycle_is_of_full_size(manual, tmp_path):
    """mflux 447, and Lightning itself: the buffer was empty and the divisor full, so that the update was too small."""

    class Watches(Learner):
        def clip_gradients(self, *args, **kwargs):
            pass

        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad.clone() for p in self.net.parameters()])

    seen: list[list[torch.Tensor]] = []
    train(Watches(manual), StatefulLoader(batches()), SaveAndCut(7, tmp_path / "c.ckpt"), max_epochs=1)
    before = make_net()
    weights = torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"]
    before.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    train(Watches(manual), StatefulLoader(batches()), path=tmp_path / "c.ckpt", max_epochs=1)
    for found, wanted in zip(seen[1], big_batch_gradients(before, batches()[4:8]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
