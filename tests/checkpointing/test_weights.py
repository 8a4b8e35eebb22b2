"""A recomputation with other weights than the forward's is an error, not a wrong gradient."""

import copy

import pytest
import torch
from torch import nn

from checkpointing.models import LM, MLPBlock
from lightning_gacp.checkpointing import checkpoint_blocks

TOKENS = torch.arange(8).view(2, 4)
X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_step_between_forward_and_backward_gives_wrong_gradients() -> None:
    plain = LM(MLPBlock, 2)
    for model in (plain, copy.deepcopy(plain)):
        if model is not plain:
            checkpoint_blocks(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(TOKENS).backward()
        loss = model(TOKENS)
        optimizer.step()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        model(TOKENS).backward()  # and it goes on


def test_the_message_names_the_weight() -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model)
    loss = model(TOKENS)
    with torch.no_grad():
        model.layers[1].up.bias.add_(1)  # plain autograd does not save biases, but the recomputation uses them
    with pytest.raises(RuntimeError, match=r"weight `layers\.1\.up\.bias` is at version \d; expected version \d"):
        loss.backward()


def test_a_replaced_weight() -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model)
    loss = model(TOKENS)
    model.layers[0].up.weight = nn.Parameter(torch.zeros_like(model.layers[0].up.weight))
    with pytest.raises(RuntimeError, match=r"weight `layers\.0\.up\.weight` was replaced"):
        loss.backward()


def test_a_functional_call_that_ends_before_the_backward() -> None:
    """The weights it lends to the module are gone when the recomputation comes."""
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model)
    lent = {name: (2 * value).detach().requires_grad_() for name, value in model.named_parameters()}
    loss = torch.func.functional_call(model, lent, (TOKENS,))
    with pytest.raises(RuntimeError, match="was replaced"):
        loss.backward()


def test_a_gan_step_between_the_generators_forward_and_its_backward() -> None:
    """The discriminator learns on a fake whose graph the generator uses after it."""
    generator, discriminator = Net(), Net()
    checkpoint_blocks(generator, blocks="layers.*")
    checkpoint_blocks(discriminator, blocks="layers.*")
    step_g = torch.optim.SGD(generator.parameters(), 0.1)
    step_d = torch.optim.SGD(discriminator.parameters(), 0.1)

    fake = generator(X)
    judged = discriminator(fake).mean()
    discriminator(fake.detach()).square().mean().backward()
    step_d.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        (-judged).backward()

    # With the loss taken after the step all is well: the generator's own weights have not changed.
    step_d.zero_grad()
    (-discriminator(fake).mean()).backward()
    step_g.step()


def test_steps_of_other_models_do_not_matter() -> None:
    first, second = Net(), Net()
    checkpoint_blocks(first, blocks="layers.*")
    checkpoint_blocks(second, blocks="layers.*")
    kept = first(X).mean()
    second(X).mean().backward()
    torch.optim.SGD(second.parameters(), 0.1).step()
    kept.backward()


def test_a_block_that_changes_its_own_weights() -> None:
    """A codebook kept as a parameter would be moved twice; there is no telling which values the user wants."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.ones(4), requires_grad=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x)) * self.codes.clone()
            self.codes.add_(1)
            return y

    model = nn.Sequential(Codebook())
    checkpoint_blocks(model, blocks=Codebook)
    with pytest.raises(RuntimeError, match=r"weight `0\.codes` is at version \d; expected version \d"):
        model(X).sum().backward()


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_weight_frozen_between_forward_and_backward(part: str) -> None:
    """As when optimizers are toggled. The graph is that of the forward, so the recomputation must be too."""
    plain = Net()
    model = copy.deepcopy(plain)
    checkpoint_blocks(model, blocks="layers.*")
    for each in (plain, model):
        loss = each(X).square().mean()
        getattr(each.layers[1][0], part).requires_grad_(False)
        loss.backward()
        assert not getattr(each.layers[1][0], part).requires_grad
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)


def test_evaluation_between_forward_and_backward_switches_dropout_and_batch_norm_off() -> None:
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)])
    model = copy.deepcopy(plain)
    checkpoint_blocks(model)
    for each in (plain, model):
        torch.manual_seed(0)
        loss = each(X).square().mean()
        each.eval()
        each(X)
        loss.backward()
        assert not any(module.training for module in each.modules())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_lazy_modules_are_made_once() -> None:
    """Their first call makes weights and buffers, and runs without checkpointing."""
    lazy = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()))
    checkpoint_blocks(lazy, blocks="0")
    for count in (1, 2):
        lazy(X).square().mean().backward()
        assert lazy[0][1].num_batches_tracked == count


def test_a_block_inside_a_block() -> None:
    """Two selections, one inside the other: more is recomputed, and nothing is changed twice."""
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Tanh()))
    model = copy.deepcopy(plain)
    checkpoint_blocks(model, blocks="0.1")
    checkpoint_blocks(model, blocks="0")
    for each in (plain, model):
        each(X).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
