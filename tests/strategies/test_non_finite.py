"""``skip_non_finite`` where nothing is finite any more, and where something still is."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gacp import GACPStrategy
from lightning_gacp.strategies import micro_batch
from tests.strategies.models import quiet_trainer


class Breaks(L.LightningModule):
    """Its loss is NaN in every micro-batch but those in ``well``."""

    def __init__(self, well: frozenset[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.well = well

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean() * (1.0 if batch_idx in self.well else float("nan"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(well: frozenset[int], micro_batches: int = 40) -> L.Trainer:
    strategy = GACPStrategy(accumulate_grad_batches=2, skip_non_finite=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=10**6)
    trainer.fit(Breaks(well), DataLoader(torch.ones(micro_batches, 2)))
    return trainer


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "_HOPELESS", 5)


@pytest.mark.filterwarnings("ignore:.*micro-batch.*lost")
def test_a_run_whose_weights_are_nan_ends_with_an_error_instead_of_never() -> None:
    with pytest.raises(RuntimeError, match=r"5 cycles in a row .* `max_steps` would never be reached"):
        train(well=frozenset())


@pytest.mark.filterwarnings("ignore:.*micro-batch.*lost")
def test_one_finite_cycle_begins_the_count_anew() -> None:
    # Cycles 4, 9 and 14 of 20 are finite: never five in a row that are not.
    trainer = train(well=frozenset({8, 9, 18, 19, 28, 29}), micro_batches=38)
    assert trainer.strategy.skipped_cycles == 16  # type: ignore[attr-defined]
    assert trainer.global_step == 3


@pytest.mark.filterwarnings("ignore:.*micro-batch.*lost")
def test_each_fit_counts_from_the_beginning() -> None:
    strategy = GACPStrategy(accumulate_grad_batches=2, skip_non_finite=True)
    trainer = quiet_trainer(strategy=strategy, max_steps=10**6)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="5 cycles in a row"):
            trainer.fit(Breaks(well=frozenset()), DataLoader(torch.ones(40, 2)))
        assert strategy.skipped_cycles == 5
