"""Processes that are killed while they train: the short form of ``benchmarks/kill_and_resume.py``."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_killed_runs_end_as_one_that_was_not(benchmark_script, manual):
    """SIGKILL inside the first cycle, at its end, inside the last of an epoch and after it; SIGTERM at some time."""
    script = benchmark_script("kill_and_resume")
    expected = script.whole(manual)
    found = {at: script.killed(manual, at, expected) for at in (2, 4, 10, 11, 17)}
    assert {at: each.inside for at, each in found.items()} == {2: True, 4: False, 10: True, 11: False, 17: True}
    for each in (*found.values(), script.terminated(manual, 0.04, expected)):
        assert each.equal
        assert each.left == []
