"""Write `docs/faults.md` anew: ``python tests/strategies/faults_page.py``. A test fails when it is out of date."""

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.faults import FAULTS, Fault, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

INTRODUCTION = """\
# What happens when something happens

A cycle that does not end well leaves nothing to the next one, and no learning-rate schedule moves without a step. What
becomes of it is one of these:

- **stepped exactly**: the step has the gradient of one big batch over what the cycle holds.
- **discarded**: its gradients are dropped, one warning says how many micro-batches were lost and why, and they are
  added up in `lost_micro_batches` of the strategy.
- **skipped**: run, and not stepped with; `global_step` does not count it. (What a `GradScaler` skips is counted there,
  as in Lightning.)
- **carried**: the checkpoint holds the open cycle, and the resumed run ends with the weights of one that was never
  stopped.
- **refused**: an error that says what to write instead.

## Checkpoints inside a cycle

Whatever writes a checkpoint inside a cycle (by time, after a validation, after an exception, SIGTERM, SLURM's requeue,
`trainer.save_checkpoint`), it holds the gradients gathered so far, the counts and the position, in one more entry
called `lightning_gacp`. A loader that can resume (`state_dict` and `load_state_dict`) goes on where training stood, not
where fetching stood. On one device the resumed run is equal bit by bit, also to its optimizer's state:
`python benchmarks/kill_and_resume.py` kills runs after every micro-batch and at random times, and compares. With DDP
and FSDP2 it is equal up to rounding, also on another number of ranks. Dropout is equal only if the module seeds it:
Lightning's checkpoints do not hold the random numbers' state.

The entry holds plain numbers and tensors, and loads with `weights_only=True`. Inside a cycle it is as large as the
gradients: the size of the trainable weights (in `grad_dtype`, where that is set; AdamW's own state is twice that).
Between two cycles it is a few counts. (The script above prints both.) Under FSDP2 the gradients lie as shards in a
folder `lightning_gacp` in that of the checkpoint. Lightning without this package loads these checkpoints, without the
open cycle; checkpoints of Lightning's are loaded here, and if one was written inside a cycle, what is missing is said.

## Faults

Every cell of the table is run by the tests: two epochs of seven micro-batches in cycles of three, with an independent
reference for the weights. On several ranks they were two, with `gacp_ddp` (DDP) and with `gacp_model_parallel` (FSDP2).
"""

SAID = """
## What is said

Each of these warnings comes once, and on rank 0 alone.

- `k micro-batches were lost: REASON. Their gradients are discarded; no step was taken with them.` The reasons above:
"""


NAMES = {"one": "one device", "ddp": "DDP", "fsdp2": "FSDP2"}
LOST = re.compile(r"\d+ micro-batch.* lost: (.*)\. (?:Its|Their) gradients are discarded; .*")


def in_words(fault: Fault, manual: bool) -> str:
    """What a cell of the table says: once, where all strategies do the same."""
    outcomes = {name: fault.outcome(manual, strategy) for strategy, name in NAMES.items()}
    cells: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Outcome):
            cells.setdefault(outcome.says, []).append(name)
    if not cells:
        return f"({outcomes['one device']})"
    if len(cells) == 1 and len(*cells.values()) == len(NAMES):
        return next(iter(cells))
    return "; ".join(f"{', '.join(names)}: {says}" for says, names in cells.items())


def page() -> str:
    """The text of the page."""
    lines = [INTRODUCTION, "| | automatic optimization | manual optimization |", "|---|---|---|"]
    texts: list[str] = []
    for fault in FAULTS.values():
        lines.append(f"| {fault.title} | {in_words(fault, False)} | {in_words(fault, True)} |")
        outcomes = [fault.outcome(manual, strategy) for manual in (False, True) for strategy in NAMES]
        texts += [text for outcome in outcomes if isinstance(outcome, Outcome) for text in outcome.said]
    reasons = dict.fromkeys(found[1] for text in texts if (found := LOST.fullmatch(text)))
    others = dict.fromkeys(text for text in texts if not LOST.fullmatch(text))
    lines.append(SAID)
    lines += [f"  - {reason}" for reason in reasons]
    lines += [f"- {text}" for text in others]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
