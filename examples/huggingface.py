"""A Hugging Face T5, built from a config, that learns to reverse words. Nothing is downloaded.

    python examples/huggingface.py fit -c examples/configs/huggingface.yaml

Its blocks are found by themselves, encoder and decoder each counted from their first, and its loss is known to be a
mean over the labels that are not -100: ``num_items`` needs no setting.
"""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, END = 0, 1


class Reverser(L.LightningModule):
    """T5 over letters.

    Args:
        width: Size of the hidden state.
        depth: Blocks of the encoder, and of the decoder.
    """

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=len(LETTERS) + 2,
            d_model=width,
            d_kv=width // 4,
            d_ff=2 * width,
            num_layers=depth,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
            use_cache=False,  # a cache is for generation; recomputation would fill it twice
        )
        self.model = T5ForConditionalGeneration(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss, a mean over the labels."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def words() -> list[str]:
    """Return the words of Python's documentation, in lower case."""
    return sorted({word for text in topics.values() for word in re.findall(r"\b[a-z]{2,12}\b", text.lower())})


def collate(texts: list[str]) -> dict[str, Tensor]:
    """Encode words and their reverses, padded to the longest."""
    longest = max(map(len, texts)) + 1

    def encode(text: str, fill: int) -> list[int]:
        return [LETTERS.index(letter) + 2 for letter in text] + [END] + [fill] * (longest - len(text) - 1)

    inputs = torch.tensor([encode(text, PAD) for text in texts])
    labels = torch.tensor([encode(text[::-1], -100) for text in texts])
    return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels}


class Words(L.LightningDataModule):
    """The words, in an order of their own.

    Args:
        batch_size: Words in a micro-batch.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Micro-batches, each padded to its longest word."""
        data = words()
        random.Random(1).shuffle(data)
        return DataLoader(data, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line."""
    return LightningCLI(Reverser, Words, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
