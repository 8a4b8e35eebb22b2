"""Every fault, in both modes and with every strategy: weights, warnings, counters, and that nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from tests.strategies.fault_cells import expected_weights, observed
from tests.strategies.faults import FAULTS, Outcome
from tests.strategies.faults_page import NAMES, PAGE, page

CELLS = [
    pytest.param(name, manual, strategy, id=f"{name}-{'manual' if manual else 'automatic'}-{strategy}")
    for strategy in NAMES
    for name, fault in FAULTS.items()
    for manual in (False, True)
    if isinstance(fault.outcome(manual, strategy), Outcome)
]


@pytest.mark.parametrize(("name", "manual", "strategy"), CELLS)
def test_cell(name: str, manual: bool, strategy: str) -> None:
    """The cells of a strategy run together, in one process group, before the first of them is looked at."""
    outcome = FAULTS[name].outcome(manual, strategy)
    assert isinstance(outcome, Outcome)
    steps = len(outcome.cycles)
    for rank, cells in enumerate(observed(strategy)):
        found = cells[name, manual]
        assert found.error == outcome.error
        assert found.said == (list(outcome.said) if rank == 0 else [])
        assert (found.lost, found.skipped) == (outcome.lost, outcome.skipped)
        assert found.moves == (steps if outcome.moves is None else outcome.moves)
        assert found.global_step == (steps if outcome.global_step is None else outcome.global_step)
        assert found.left == []
        if outcome.finite:
            for ours, theirs in zip(found.weights, expected_weights(FAULTS[name], outcome, strategy), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        else:
            assert not all(np.isfinite(weights).all() for weights in found.weights)


def test_page_is_what_the_cells_say() -> None:
    assert PAGE.read_text() == page(), "run `python tests/strategies/faults_page.py`"
