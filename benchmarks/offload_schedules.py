"""Run the offload engine under many random schedules of the simulated device.

    python benchmarks/offload_schedules.py [--schedules 10000] [--first 0]

Every schedule runs one of the workloads of the tests, in turn, with settings, copies and streams at times drawn from
its seed. Gradients must equal those without offload bit for bit, and no access may be unordered. The exit status says
so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run it; 0 when all is well."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the simulated device lives with the tests
    from offload.workloads import WORKLOADS, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed, to split the work")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = list(WORKLOADS)
    done: Counter[str] = Counter()
    failed = 0
    start = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        name = names[seed % len(names)]
        problems = run(name, seed)
        done[name] += 1
        if problems:
            failed += 1
            print(f"seed {seed}, {name}: {problems[:3]}", flush=True)
    for name, count in done.items():
        print(f"{count:6} schedules of {name}")
    print(f"{sum(done.values())} schedules, {failed} wrong, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
