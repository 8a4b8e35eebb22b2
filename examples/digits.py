"""Handwritten digits with batch norm: accumulation by samples, recomputation, statistics that change once a forward.

    python examples/digits.py fit -c examples/configs/digits.yaml

Batch norm looks across a micro-batch, so accumulation cannot make its statistics those of the whole batch: keep
micro-batches large enough for it. Recomputation leaves the running statistics as they would be without.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them.

    Args:
        channels: Channels in and out.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape ``(batch, channels, 8, 8)`` to the same shape."""
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(inner)))


class Digits(L.LightningModule):
    """A small residual network for 8 x 8 images.

    Args:
        channels: Channels of the blocks.
        depth: Number of blocks.
    """

    def __init__(self, channels: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape ``(batch, 1, 8, 8)`` to logits of shape ``(batch, 10)``."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the samples."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure the share of digits that are read right."""
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class DigitsData(L.LightningDataModule):
    """The 1,797 digits that come with scikit-learn: every fifth for validation.

    Args:
        batch_size: Images in a micro-batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Load and split."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        self.train = TensorDataset(images[~held_out], labels[~held_out])
        self.val = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Micro-batches in a new order each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The held-out digits."""
        return DataLoader(self.val, 128)


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line."""
    return LightningCLI(Digits, DigitsData, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
