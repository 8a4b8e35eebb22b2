"""Several optimizers in manual optimization: gradients are set aside, and what other losses leave is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gacp import GACPStrategy
from tests.strategies.models import loader, quiet_trainer, relative_error

ROWS = [5, 2, 7, 1, 3, 4, 6]


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(4, 6).double(), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(n, 4, generator=generator).double(), torch.randn(n, 6, generator=generator).double()) for n in ROWS
    ]


def generator_loss(generator: nn.Module, critic: nn.Module, noise: Tensor) -> Tensor:
    return F.softplus(-critic(generator(noise))).mean()


def critic_loss(generator: nn.Module, critic: nn.Module, noise: Tensor, real: Tensor) -> Tensor:
    return (F.softplus(-critic(real)) + F.softplus(critic(generator(noise).detach()))).mean()


class GAN(LightningModule):
    """The generator's loss leaves gradients in the critic, which only the critic's ``zero_grad`` removes."""

    def __init__(self, order: str, momentum: float = 0.9) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = make_pair()
        self.order = order
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        g_opt, c_opt = self.optimizers()
        if self.order == "zero first":
            g_opt.zero_grad()
            self.manual_backward(generator_loss(self.generator, self.critic, noise))
            g_opt.step()
            c_opt.zero_grad()
            self.manual_backward(critic_loss(self.generator, self.critic, noise, real))
            c_opt.step()
        elif self.order == "critic first":
            c_opt.zero_grad()
            self.manual_backward(critic_loss(self.generator, self.critic, noise, real))
            c_opt.step()
            g_opt.zero_grad()
            self.manual_backward(generator_loss(self.generator, self.critic, noise))
            g_opt.step()
        elif self.order == "zero last":
            self.manual_backward(critic_loss(self.generator, self.critic, noise, real))
            c_opt.step()
            c_opt.zero_grad()
            self.manual_backward(generator_loss(self.generator, self.critic, noise))
            g_opt.step()
            g_opt.zero_grad()
            c_opt.zero_grad()
        elif self.order == "closures":

            def g_closure() -> Tensor:
                loss = generator_loss(self.generator, self.critic, noise)
                g_opt.zero_grad()
                self.manual_backward(loss)
                return loss

            def c_closure() -> Tensor:
                loss = critic_loss(self.generator, self.critic, noise, real)
                c_opt.zero_grad()
                self.manual_backward(loss)
                return loss

            g_opt.step(closure=g_closure)
            c_opt.step(closure=c_closure)
        elif self.order == "toggled":
            with g_opt.toggle_model():
                g_opt.zero_grad()
                self.manual_backward(generator_loss(self.generator, self.critic, noise))
                g_opt.step()
            with c_opt.toggle_model():
                c_opt.zero_grad()
                self.manual_backward(critic_loss(self.generator, self.critic, noise, real))
                c_opt.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=self.momentum) for net in (self.generator, self.critic)
        ]


def reference(order: str, cycle: int, epochs: int) -> tuple[nn.Module, nn.Module]:
    """The same training on the concatenation of each cycle, in plain torch.

    Within a cycle both steps see the weights that the cycle began with where the second loss comes after the first
    step of the same big batch; so does the module in a cycle of one, and so does the strategy: a step inside an open
    cycle is not taken before its end. The reference therefore steps in the module's order on the big batch.
    """
    generator, critic = make_pair()
    g_opt, c_opt = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (generator, critic))
    data = make_data()

    def step(optimizer: torch.optim.Optimizer, gradients: list[Tensor], net: nn.Module) -> None:
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    for _ in range(epochs):
        for start in range(0, len(data), cycle):
            group = data[start : start + cycle]
            total = sum(len(noise) for noise, _ in group)
            # All but the last micro-batch's second loss see the weights from before the cycle's steps.
            *early, (noise, real) = group
            parts: dict[str, list[Tensor]] = {}

            def add(name: str, net: nn.Module, loss: Tensor, rows: int, parts: Any = parts, total: int = total) -> None:
                found = torch.autograd.grad(loss * rows / total, list(net.parameters()))
                parts[name] = [a + b for a, b in zip(parts.get(name, [0.0] * len(found)), found, strict=True)]

            for n, r in early:
                add("g", generator, generator_loss(generator, critic, n), len(n))
                add("c", critic, critic_loss(generator, critic, n, r), len(n))
            if order in ("critic first", "zero last"):
                add("c", critic, critic_loss(generator, critic, noise, real), len(noise))
                step(c_opt, parts["c"], critic)
                add("g", generator, generator_loss(generator, critic, noise), len(noise))
                step(g_opt, parts["g"], generator)
            else:
                add("g", generator, generator_loss(generator, critic, noise), len(noise))
                step(g_opt, parts["g"], generator)
                add("c", critic, critic_loss(generator, critic, noise, real), len(noise))
                step(c_opt, parts["c"], critic)
    return generator, critic


@pytest.mark.parametrize("cycle", [1, 2, 3, 7])
@pytest.mark.parametrize("order", ["zero first", "critic first", "zero last", "closures", "toggled"])
def test_gan_accumulates_without_a_changed_line(order: str, cycle: int) -> None:
    """Weights of two optimizers with momentum after two epochs, against plain torch, to 1e-12."""
    module = GAN(order)
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=cycle, num_items="samples"), max_epochs=2)
    trainer.fit(module, loader(make_data()))
    generator, critic = reference(order, cycle, 2)
    assert relative_error(list(module.generator.parameters()), list(generator.parameters())) < 1e-12
    assert relative_error(list(module.critic.parameters()), list(critic.parameters())) < 1e-12
    # two optimizers: Lightning counts the steps of both
    assert trainer.global_step == 2 * 2 * -(-len(ROWS) // cycle)


def test_ignoring_zero_grad_would_be_wrong() -> None:
    """What the generator leaves in the critic is not small: who ignored ``zero_grad`` would step with it."""
    generator, critic = make_pair()
    noise, real = make_data()[0]
    wanted = list(torch.autograd.grad(critic_loss(generator, critic, noise, real), list(critic.parameters())))
    left = torch.autograd.grad(generator_loss(generator, critic, noise), list(critic.parameters()))
    assert relative_error([a + b for a, b in zip(wanted, left, strict=True)], wanted) > 0.3
