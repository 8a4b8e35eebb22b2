"""Draw docs/memory.png: memory over one optimizer step of the example model, with and without recomputation.

python benchmarks/memory_picture.py
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import lightning as L

import lightning_gacp as gacp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_lm import LanguageModel, Paragraphs


def record(folder: str, compare_with: str | None, *callbacks: L.Callback) -> Path:
    """Train for two optimizer steps, draw the second, and return the picture."""
    L.seed_everything(1, verbose=False)
    timeline = gacp.MemoryTimeline(dirpath=folder, compare_with=compare_with)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=gacp.GACPStrategy(accumulate_grad_batches=3, num_items="labels"),
        callbacks=[*callbacks, timeline],
    )
    trainer.fit(LanguageModel(), datamodule=Paragraphs())
    assert timeline.path is not None
    return timeline.path


def main() -> None:
    """Draw."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        record(f"{folder}/plain", None)
        before = f"{folder}/plain/gacp_memory.json"
        picture = record(f"{folder}/recomputed", before, gacp.ActivationCheckpointing())
        shutil.copy(picture, Path(__file__).parents[1] / "docs" / "memory.png")


if __name__ == "__main__":
    main()
