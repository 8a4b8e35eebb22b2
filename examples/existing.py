"""A script that knows nothing of this package: which kind of character has this Unicode name?

    python examples/existing.py
    git apply examples/existing.diff  # three lines more: accumulation, recomputation, a report

Names and categories are those of Python's own ``unicodedata``.
"""

import unicodedata
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

KINDS = ["Lu", "Ll", "Lo", "Mn", "Nd", "Po", "So", "Sm"]


class Namer(L.LightningModule):
    """A small transformer over the letters of a name."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(KINDS))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the names."""
        names, kinds = batch
        padding = names == 0
        encoded = self.encoder(self.letters(names), src_key_padding_mask=padding)
        mean = encoded.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True)
        return F.cross_entropy(self.head(mean), kinds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def collate(characters: list[str]) -> tuple[Tensor, Tensor]:
    """Return the names, padded to the longest, and the kinds."""
    names = [torch.tensor(list(unicodedata.name(character).encode())) for character in characters]
    kinds = [KINDS.index(unicodedata.category(character)) for character in characters]
    return nn.utils.rnn.pad_sequence(names, batch_first=True), torch.tensor(kinds)


def main(**options: Any) -> L.Trainer:
    """Train for one epoch; ``options`` are the Trainer's."""
    L.seed_everything(1)
    characters = [c for c in map(chr, range(0x2000)) if unicodedata.name(c, "") and unicodedata.category(c) in KINDS]
    trainer = L.Trainer(
        max_epochs=1,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(Namer(), DataLoader(characters, batch_size=8, shuffle=True, collate_fn=collate))  # type: ignore[arg-type]
    return trainer


if __name__ == "__main__":
    main()
