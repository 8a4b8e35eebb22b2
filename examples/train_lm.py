"""Train a byte-level language model on the prose of Python's own documentation.

The data are the paragraphs of ``pydoc_data.topics`` (about 0.5 MB, part of every Python, nothing to download). A
micro-batch is padded to its longest paragraph, so the number of tokens differs from micro-batch to micro-batch: the
case in which dividing every loss by the number of micro-batches is wrong.

    python examples/train_lm.py fit -c examples/configs/base.yaml -c examples/configs/accumulate.yaml

Nothing in this file knows about accumulation, checkpointing or offload; the YAML files add them.
"""

from __future__ import annotations

import math
import re
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

BYTES = 256
START = 256  # stands before the first byte of a paragraph
PADDING = -100  # what cross entropy and the counters of items leave out


class Block(nn.Module):
    """One pre-norm transformer block, causal.

    Args:
        width: Size of the hidden state.
        heads: Number of attention heads; divides ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a hidden state of shape ``(batch, time, width)`` to one of the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """A small GPT over bytes.

    Args:
        width: Size of the hidden state.
        depth: Number of blocks.
        heads: Number of attention heads.
        context: The longest sequence.
    """

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES + 1, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # the layers that add to the residual stream start smaller, the more of them there are
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * depth) if residual else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids of shape ``(batch, time)`` to logits of shape ``(batch, time, 256)``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(L.LightningModule):
    """The model, its loss (mean over tokens) and its optimizer.

    Args:
        width: Size of the hidden state.
        depth: Number of blocks.
        heads: Number of attention heads.
        context: The longest sequence.
        learning_rate: Peak of the schedule (warm-up over a tenth of the steps, then cosine).
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 8,
        heads: int = 4,
        context: int = 256,
        learning_rate: float = 5e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = ByteGPT(width, depth, heads, context)
        # One metric per stage. Sums over tokens, so that batches of different length weigh what they hold.
        self.loss_of = nn.ModuleDict({"val_": MeanMetric(), "test_": MeanMetric()})
        self.perplexity_of = nn.ModuleDict(
            {"val_": Perplexity(ignore_index=PADDING), "test_": Perplexity(ignore_index=PADDING)}
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the tokens of a micro-batch, in nats."""
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=PADDING)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of one micro-batch."""
        return self.loss(self.model(batch["ids"]), batch["labels"])

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        logits, labels = self.model(batch["ids"]), batch["labels"]
        self.loss_of[stage + "_"].update(self.loss(logits, labels), weight=(labels != PADDING).sum())
        self.perplexity_of[stage + "_"].update(logits.float(), labels)
        self.log(f"{stage}/loss", self.loss_of[stage + "_"], batch_size=1)
        self.log(f"{stage}/perplexity", self.perplexity_of[stage + "_"], batch_size=1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Measure held-out paragraphs during training."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Measure paragraphs that nothing was chosen on."""
        self._evaluate(batch, "test")

    @rank_zero_only
    def on_validation_epoch_end(self) -> None:
        """Print where the training stands."""
        loss, perplexity = self.loss_of["val_"].compute(), self.perplexity_of["val_"].compute()
        print(f"after {self.global_step:4d} steps: held-out loss {loss:.3f} nats a byte, perplexity {perplexity:.2f}")

    def configure_optimizers(self) -> Any:
        """AdamW, stepped with its schedule once an optimizer step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def paragraphs(longest: int) -> list[bytes]:
    """Return the paragraphs of Python's documentation, cut into pieces of at most ``longest`` bytes."""
    pieces = []
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            text = paragraph.strip().encode()
            pieces += [text[start : start + longest] for start in range(0, len(text), longest)]
    return pieces


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Pad a micro-batch to its longest paragraph.

    Returns:
        ``ids``: ``(batch, time)`` int64, a start mark and all bytes but the last.
        ``labels``: ``(batch, time)`` int64, the byte to predict at each place, ``-100`` where there is none.
    """
    time = max(len(text) for text in texts)
    ids = torch.full((len(texts), time), START)
    labels = torch.full((len(texts), time), PADDING)
    for row, text in enumerate(texts):
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        ids[row, 1 : len(text)] = values[:-1]
        labels[row, : len(text)] = values
    return {"ids": ids, "labels": labels}


class Paragraphs(L.LightningDataModule):
    """Paragraphs of Python's documentation: every 20th for validation, every 20th for the test, the rest to train on.

    Args:
        batch_size: Paragraphs in a micro-batch.
        context: The longest piece, in bytes.
        limit: Use only that many pieces; 0 for all.
    """

    def __init__(self, batch_size: int = 4, context: int = 256, limit: int = 0) -> None:
        super().__init__()
        self.batch_size, self.context, self.limit = batch_size, context, limit

    def setup(self, stage: str) -> None:
        """Split the paragraphs."""
        texts = paragraphs(self.context)
        texts = texts[: self.limit or len(texts)]
        self.train = [text for place, text in enumerate(texts) if place % 20 not in (0, 10)]
        self.val, self.test = texts[::20], texts[10::20]

    def _loader(self, texts: list[bytes], shuffle: bool) -> DataLoader[Any]:
        size = self.batch_size if shuffle else 8 * self.batch_size
        return DataLoader(texts, batch_size=size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Any]:
        """Micro-batches in a new order each epoch."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Held-out paragraphs, looked at during training."""
        return self._loader(self.val, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Held-out paragraphs, looked at once."""
        return self._loader(self.test, shuffle=False)


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line; after a fit, measure the test paragraphs.

    Args:
        args: The command line; ``None`` takes the process's.
    """
    cli = LightningCLI(
        LanguageModel,
        Paragraphs,
        # On a CUDA device in bf16, else in float32; a config or an option may say otherwise.
        trainer_defaults={"precision": "bf16-mixed" if torch.cuda.is_available() else "32-true"},
        save_config_kwargs={"overwrite": True},
        args=args,
    )
    if cli.subcommand == "fit" and not cli.trainer.fast_dev_run:
        cli.trainer.test(cli.model, datamodule=cli.datamodule)
    return cli


if __name__ == "__main__":
    main()
