"""Switch off every wait and keep-alive of the offload engine in turn, and show that the simulated device misses each.

    python benchmarks/offload_mutations.py [--seeds 4]

A row of the table is a site of `lightning_gacp.offload.device.Site`. It says in how many runs of the workloads
something was wrong without it, and what was noticed first: an access that no event orders, or a wrong number. A site
that is never missed would not be needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run it; 0 when all is well."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the simulated device lives with the tests
    from offload.workloads import WORKLOADS, run

    from lightning_gacp.offload.device import Site

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="schedules for each workload and site")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    sound = sum(bool(run(name, seed)) for name in WORKLOADS for seed in range(seeds))
    print(f"{'site':26} {'runs':>5} {'wrong':>6} {'by numbers':>11}  noticed first")
    print(f"{'(nothing switched off)':26} {len(WORKLOADS) * seeds:5} {sound:6}")
    missed = True
    for site in Site:
        wrong, numbers, first = 0, 0, ""
        for name in WORKLOADS:
            for seed in range(seeds):
                problems = run(name, seed, frozenset({site}))
                wrong += bool(problems)
                numbers += any("not ordered" not in problem for problem in problems)
                if problems and not first:
                    first = f"{name}: {problems[0]}"
        missed = missed and wrong > 0
        print(f"{site.name:26} {len(WORKLOADS) * seeds:5} {wrong:6} {numbers:11}  {first[:110]}", flush=True)
    return 0 if missed and not sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
