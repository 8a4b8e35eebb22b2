"""A GAN in manual optimization, accumulated without a changed line in the module.

    python examples/gan.py fit -c examples/configs/gan.yaml

The module steps two optimizers in every ``training_step``, as it would without accumulation. The strategy in the YAML
lets each of them step once a cycle, on the gradient of the whole cycle.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader


def network(inputs: int, outputs: int, width: int, depth: int) -> nn.Sequential:
    """Return a perceptron whose hidden layers are blocks of the same class."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2)) for _ in range(depth)]
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, outputs))


class GAN(L.LightningModule):
    """Learns to draw points on a ring.

    Args:
        width: Size of the hidden layers.
        depth: Number of hidden layers.
    """

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(8, 2, width, depth)
        self.discriminator = network(2, 1, width, depth)

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        """Step the discriminator, then the generator."""
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8, device=self.device))

        for_discriminator.zero_grad()
        loss = (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake.detach()))).mean()
        self.manual_backward(loss)
        for_discriminator.step()

        for_generator.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        for_generator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer a network."""
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in self.children()]


def ring(number: int) -> Tensor:
    """Return points near the unit circle, shape ``(number, 2)``."""
    angle = 2 * torch.pi * torch.rand(number)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(number, 2)


class Ring(L.LightningDataModule):
    """Points near a ring, new ones each epoch.

    Args:
        batch_size: Points in a micro-batch.
        batches: Micro-batches in an epoch.
    """

    def __init__(self, batch_size: int = 64, batches: int = 1200) -> None:
        super().__init__()
        self.batch_size, self.batches = batch_size, batches

    def train_dataloader(self) -> DataLoader[Tensor]:
        """The points, in micro-batches."""
        return DataLoader(ring(self.batch_size * self.batches), batch_size=self.batch_size)  # type: ignore[arg-type]


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line; after a fit, print how far from the ring the points end up."""
    cli = LightningCLI(GAN, Ring, save_config_callback=None, args=args)
    with torch.no_grad():
        radius = cli.model.generator(torch.randn(2000, 8)).norm(dim=1)
    print(f"radius of the generated points: {radius.mean():.2f} +- {radius.std():.2f} (the ring's is 1.00 +- 0.05)")
    return cli


if __name__ == "__main__":
    main()
