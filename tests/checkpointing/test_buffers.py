"""State that a forward changes is changed once, and the recomputation sees it as the forward saw it."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing.models import LiveBytes, assert_equal, assert_same_training, train
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.checkpointing.state import _SMALL

BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make()

    def make(self) -> None: ...

    def change(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.change(self.linear(x)))


class BatchNorm(Block):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class CumulativeBatchNorm(BatchNorm):
    """Its momentum is one over the number of batches so far."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(4, momentum=None)


class RunningMean(Block):
    """The output depends on the buffer, as it was before or after the change."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(4))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        before = self.mean.clone()
        self.update(x.detach().mean(0))
        return x * before + self.mean

    def update(self, value: torch.Tensor) -> None:
        self.mean.mul_(0.5).add_(value)


class AssignedMean(RunningMean):
    """A new tensor each time."""

    def update(self, value: torch.Tensor) -> None:
        self.mean = 0.5 * self.mean + value


class DataMean(RunningMean):
    """Through `.data`, which the version of the buffer does not show."""

    def update(self, value: torch.Tensor) -> None:
        self.mean.data.copy_(0.5 * self.mean.data + value)


class LateMean(RunningMean):
    """Only from the third call on, and through `.data`."""

    def make(self) -> None:
        super().make()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def update(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > 2:
            self.mean.data.add_(value)


class LateTable(RunningMean):
    """A large buffer, left alone while habits are learned, and then changed in place."""

    def make(self) -> None:
        self.register_buffer("table", torch.zeros(_SMALL))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    @property
    def mean(self) -> torch.Tensor:
        return self.table[:4]

    def update(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > 2:
            self.table[:4] += value


class DataTable(LateTable):
    """A large buffer that is changed through `.data` from the first call on."""

    def update(self, value: torch.Tensor) -> None:
        self.table.data[:4] += value


class LateIndex(RunningMean):
    """A small integer table that is replaced in a late call."""

    def make(self) -> None:
        super().make()
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def update(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > 2:
            self.index = self.index.flip(0)
        self.mean = value[self.index]


class LazyMean(RunningMean):
    """`None` until the first call."""

    def make(self) -> None:
        self.register_buffer("mean", None)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return super().change(x)


class SharedBuffers(Block):
    """One tensor under two names, and a view of a third."""

    def make(self) -> None:
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("same", self.one)
        self.register_buffer("table", torch.ones(2, 4))
        self.register_buffer("row", self.table[1])

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.one += 1
        self.table += x.detach().mean(0)
        return torch.sin(x * self.same.clone() + self.row.clone())


class Attributes(Block):
    """No buffers: numbers, a switch that is made by the first forward, and a tensor changed in place or replaced."""

    def make(self) -> None:
        self.temperature, self.steps, self.mean, self.last = 1.0, 0, torch.zeros(4), None

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.9
        self.steps += 1
        y = torch.sigmoid(x * self.temperature + self.mean) ** self.steps
        if hasattr(self, "started"):
            y = y * self.last
        self.started = True
        self.mean.add_(x.detach().mean(0))
        self.last = x.detach().std(0)
        return y


class Quantiser(Block):
    """A vector quantiser: moving averages of the codes, written through `.data`, which also choose the output."""

    def make(self) -> None:
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.ones(8))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cdist(x.detach(), self.codes).argmin(1)
        hot = F.one_hot(chosen, 8).float()
        quantised = self.codes[chosen]
        self.counts.data.mul_(0.9).add_(0.1 * hot.sum(0))
        self.codes.data.mul_(0.9).add_(0.1 * hot.t() @ x.detach() / self.counts[:, None])
        return x + (quantised - x).detach() + 0.1 * (x - quantised)


class OldSpectralNorm(Block):
    def make(self) -> None:
        self.linear = spectral_norm(self.linear)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SpectralNorm(OldSpectralNorm):
    def make(self) -> None:
        self.linear = parametrizations.spectral_norm(self.linear)


ALL = [
    BatchNorm,
    CumulativeBatchNorm,
    RunningMean,
    AssignedMean,
    DataMean,
    LateMean,
    LateTable,
    DataTable,
    LateIndex,
    LazyMean,
    SharedBuffers,
    Attributes,
    Quantiser,
    SpectralNorm,
    pytest.param(OldSpectralNorm, marks=pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`|.*deprecated")),
]


def model(cls: type[Block]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), cls(), cls())


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
def test_running_statistics_are_updated_twice(cls: type[Block], policy: str) -> None:
    assert_same_training(model(cls), BATCHES, loss, policy=policy)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_alive_each_see_the_buffers_of_their_own_forward(cls: type[Block], order: tuple[int, int]) -> None:
    """Copying values in and out, instead of rebinding, mixes the two up."""
    plain = model(cls)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, blocks=cls)
    results = []
    for each in (plain, checkpointed):
        for batch in BATCHES[2:]:  # so that the late ones are late
            loss(each, batch)
        losses = [loss(each, batch) for batch in BATCHES[:2]]
        for index in order:
            losses[index].backward()
        gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
        results.append({**gradients, **each.state_dict()})
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("cls", ALL)
def test_each_recomputation_starts_from_the_same_buffers(cls: type[Block]) -> None:
    plain = model(cls)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, blocks=cls)
    for each in (plain, checkpointed):
        value = loss(each, BATCHES[0])
        value.backward(retain_graph=True)
        value.backward()
    assert_equal(dict(checkpointed.state_dict()), dict(plain.state_dict()))
    for a, b in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_attributes_move_once() -> None:
    checkpointed = model(Attributes)
    checkpoint_blocks(checkpointed, blocks=Attributes)
    train(checkpointed, BATCHES, loss)
    assert checkpointed[1].steps == len(BATCHES)
    assert checkpointed[1].temperature == pytest.approx(0.9 ** len(BATCHES))
    assert checkpointed[1].started


def test_a_generator_of_the_blocks_own_draws_the_same_numbers_again() -> None:
    class Noisy(Block):
        def make(self) -> None:
            self.generator = torch.Generator().manual_seed(3)

        def change(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * torch.rand(4, generator=self.generator))

    plain, checkpointed = model(Noisy), model(Noisy)  # a generator has no deep copy
    checkpointed.load_state_dict(plain.state_dict())
    checkpoint_blocks(checkpointed, blocks=Noisy)
    assert_equal(train(checkpointed, BATCHES, loss), train(plain, BATCHES, loss))
    assert torch.equal(checkpointed[1].generator.get_state(), plain[1].generator.get_state())


def test_batch_norm_counts_its_batches_once() -> None:
    checkpointed = model(BatchNorm)
    checkpoint_blocks(checkpointed, blocks=BatchNorm)
    train(checkpointed, BATCHES, loss)
    assert checkpointed[1].norm.num_batches_tracked == len(BATCHES)


def train_synchronised(rank: int, rendezvous: str, device: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    batches = [batch.to(device) + rank for batch in BATCHES]
    plain = model(BatchNorm)
    if device != "cpu":
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain).to(device)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, blocks=BatchNorm)
    assert_equal(train(checkpointed, batches, loss), train(plain, batches, loss))
    assert checkpointed[1].norm.num_batches_tracked == len(batches)
    torch.distributed.destroy_process_group()


@pytest.mark.cuda
def test_synchronised_batch_norm_moves_its_statistics_once(tmp_path: Path) -> None:
    """It exists on CUDA only, and needs two ranks; gloo lets them share a device. Spawned, as CUDA cannot be forked."""
    torch.multiprocessing.spawn(train_synchronised, (f"file://{tmp_path / 'rendezvous'}", "cuda:0"), nprocs=2)


def test_batch_norm_unfrozen_late() -> None:
    """Frozen while the first calls are watched; its kernels change the statistics without a new version."""

    def unfreezing(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.train()
        for block in module[1:]:
            block.norm.train(bool(x is BATCHES[3]))
        return loss(module, x)

    assert_same_training(model(BatchNorm), BATCHES, unfreezing)


def test_the_buffer_objects_stay_the_same() -> None:
    """Others may hold them: DDP broadcasts buffers, weight averaging copies them."""
    checkpointed = model(BatchNorm)
    checkpoint_blocks(checkpointed, blocks=BatchNorm)
    before = [id(buffer) for buffer in checkpointed.buffers()]
    train(checkpointed, BATCHES, loss)
    assert [id(buffer) for buffer in checkpointed.buffers()] == before


def test_an_exception_in_the_recomputation_gives_the_buffers_back() -> None:
    class Failing(BatchNorm):
        calls: tuple[list[None]] = ([],)

        def change(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0].append(None)
            if len(self.calls[0]) == 2:
                raise ZeroDivisionError
            return super().change(x)

    checkpointed = model(Failing)
    checkpoint_blocks(checkpointed, blocks="2")
    before = [id(buffer) for buffer in checkpointed.buffers()]
    with pytest.raises(ZeroDivisionError):
        loss(checkpointed, BATCHES[0]).backward()
    assert [id(buffer) for buffer in checkpointed.buffers()] == before


def test_large_tables_are_copied_only_while_they_are_watched() -> None:
    """A mask or a table of positions costs a comparison in two calls, and memory in none."""

    class Table(Block):
        def make(self) -> None:
            self.register_buffer("table", torch.ones(_SMALL))

        def change(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[0]

    class Comparisons(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.equal.default
            return func(*args, **(kwargs or {}))

    checkpointed = nn.Sequential(Table())
    checkpoint_blocks(checkpointed, blocks=Table)
    with Comparisons() as comparisons:
        for _ in range(5):
            loss(checkpointed, BATCHES[0]).backward()
    assert comparisons.count == 2
    with LiveBytes() as live:
        output = checkpointed(BATCHES[0])
        assert live.now < _SMALL < live.peak
    del output


def test_a_buffer_that_requires_a_gradient() -> None:
    plain = nn.Sequential(RunningMean(), nn.Linear(4, 4))
    plain[0].register_buffer("mean", torch.ones(4, requires_grad=True))
    plain[0].update = lambda value: None
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, blocks=RunningMean)
    for each in (plain, checkpointed):
        loss(each, BATCHES[0]).backward()
    assert torch.equal(checkpointed[0].mean.grad, plain[0].mean.grad)


def test_buffers_made_in_inference_mode() -> None:
    """They count no versions, and cannot be changed outside of inference mode, but reading them is fine."""
    checkpointed = nn.Sequential(RunningMean(), nn.Linear(4, 4))
    with torch.inference_mode():
        table = torch.ones(4)
    checkpointed[0].register_buffer("table", table)
    checkpointed[0].update = lambda value: None
    checkpoint_blocks(checkpointed, blocks=RunningMean)
    loss(checkpointed, BATCHES[0]).backward()
    assert checkpointed[0].table is table
