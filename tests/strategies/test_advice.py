"""Settings of the strategies that have no effect: said once, in a line of their own, and only where it is true."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_gacp import GACPStrategy
from lightning_gacp.strategies.advice import say_what_changes_nothing
from tests.strategies.models import Automatic, loader, quiet_trainer, ragged_batches

BATCHES = [4, 5, 3, 6]


def said(caplog: pytest.LogCaptureFixture, *callbacks: Any, **settings: Any) -> list[str]:
    caplog.clear()
    trainer = quiet_trainer(strategy=GACPStrategy(**settings), callbacks=list(callbacks))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(Automatic(), loader(ragged_batches(BATCHES)))
    return [text for text in caplog.messages if "has no effect" in text or "changes no gradient" in text]


def test_items_in_cycles_of_one(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = said(caplog, num_items="labels")
    assert text.startswith("`num_items=Targets(key='labels', ignore_index=-100)` changes no gradient")
    assert said(caplog, num_items="labels", accumulate_grad_batches=2) == []
    assert not any("num_items" in text for text in said(caplog, num_items="labels", accumulate_grad_batches={1: 2}))
    assert said(caplog, GradientAccumulationScheduler({1: 2}), num_items="labels") == []
    assert said(caplog, num_items=None) == []


def test_epochs_that_never_come(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = said(caplog, num_items="labels", accumulate_grad_batches={0: 2, 4: 3})
    assert text == "`accumulate_grad_batches={4: 3}` has no effect: epochs count from 0, and there are 1 of them."


def test_ranks_and_dtypes(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"num_items": "labels", "accumulate_grad_batches": 2}
    (text,) = said(caplog, **settings, average_across_ranks=False)
    assert "`average_across_ranks=False` has no effect" in text
    (text,) = said(caplog, **settings, grad_dtype=torch.float32)
    assert "`grad_dtype=torch.float32` has no effect" in text
    assert said(caplog, **settings, grad_dtype="float64") == []


def test_several_ranks_and_deferred_reduction(caplog: pytest.LogCaptureFixture) -> None:
    """On two ranks items do weigh, also in cycles of one; a reduction is deferred only where there is a later one."""
    strategy = GACPStrategy(num_items="labels", average_across_ranks=False)
    trainer = quiet_trainer(strategy=strategy)
    trainer.strategy._lightning_module = Automatic()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        say_what_changes_nothing(strategy.settings, trainer, 2, False)
        assert caplog.messages == []
        say_what_changes_nothing(strategy.settings, trainer, 2, True)
    assert len(caplog.messages) == 1 and "`defer_gradient_sync=True` has no effect" in caplog.messages[0]
