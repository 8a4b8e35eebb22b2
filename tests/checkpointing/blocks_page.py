"""Write `docs/blocks.md` anew: ``python tests/checkpointing/blocks_page.py``. A test fails when it is out of date."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from checkpointing.families import TRANSFORMERS, Family
from checkpointing.structures import STRUCTURES
from lightning_gacp.blocks import find_blocks

PAGE = Path(__file__).parents[2] / "docs" / "blocks.md"

INTRODUCTION = """\
# Which blocks are found

`ActivationCheckpointing()` and `ActivationOffload()` find the repeated blocks of a model by themselves:

1. The layers that Hugging Face transformers marks for checkpointing (`GradientCheckpointingLayer`), or, where there
   are none, the members of a `ModuleList` that `_no_split_modules` names. Both by the name of the class: transformers
   is not imported.
2. Else the same-class children of `ModuleList`, `ModuleDict` and `Sequential`: of the class that holds most
   parameters, and of others that hold at least a twentieth of that. A plain `Linear` or activation is no block.
3. Else the same-class attributes of one module that are numbered, such as `down1` and `down2`.

Where blocks lie inside others, the outer ones are taken (the layers of a mixture of experts, not the experts), except
that the *stages* of a hierarchical vision model, which differ in width, make way for the blocks inside. (For Swin,
transformers itself checkpoints stages and layers, one inside the other, and computes every layer three times. The
layers alone have the same peak. `checkpoint_blocks(model)` and then `checkpoint_blocks(model, blocks="SwinStage")` do
as transformers does.)

`blocks=` overrides all this: a class, a class name, a pattern of module names such as `"model.layers.*"`, or a list of
these. `every_n_layers` counts in each stack of this table apart.

The table is made and checked by the tests, with tiny configurations; the numbers of blocks are theirs.
"""


def stacks_of(family: Family) -> dict[str, tuple[str, int]]:
    """What is found in the model of ``family``: stack -> class of the blocks, number of blocks."""
    found: dict[str, tuple[str, int]] = {}
    for block in find_blocks(family.make()):
        classes, count = found.get(block.stack, ("", 0))
        name = type(block.module).__name__
        found[block.stack] = (classes if name in classes.split(", ") else f"{classes}, {name}".strip(", "), count + 1)
    return found


def page() -> str:
    """The text of the page."""
    lines = [INTRODUCTION]
    for title, families in (("transformers", TRANSFORMERS), ("Others", STRUCTURES)):
        lines += [f"\n## {title}\n", "| model | stack | blocks |", "|---|---|---|"]
        for name, family in families.items():
            for stack, (cls, count) in stacks_of(family).items():
                where = f"`{stack}`" if stack else "the model itself"
                classes = "`" + cls.replace(", ", "`, `") + "`"
                lines.append(f"| {name} | {where} | {count} x {classes} |")
                name = ""
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
