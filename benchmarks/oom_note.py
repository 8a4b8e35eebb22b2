"""Print the advice that `OOMAdvice` adds to an out-of-memory error of the example model, thrown on purpose.

python benchmarks/oom_note.py
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

import lightning_gacp as gacp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_lm import LanguageModel, Paragraphs


class Large(LanguageModel):
    """Runs out of memory after its first forward."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Fail."""
        super().training_step(batch, batch_idx)
        raise torch.OutOfMemoryError("thrown on purpose")


def main() -> str:
    """Return the note."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    L.seed_everything(1, verbose=False)
    advice = gacp.OOMAdvice()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=gacp.GACPStrategy(accumulate_grad_batches=4, num_items="labels"),
        callbacks=[advice],
    )
    module = Large()
    try:
        trainer.fit(module, datamodule=Paragraphs())
    except torch.OutOfMemoryError as error:
        return "\n".join(getattr(error, "__notes__", []))
    raise AssertionError("the error did not come through")


if __name__ == "__main__":
    print(main())
