"""DDP on two CPU ranks: the step is that of one big batch over both, with one all-reduce a cycle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_gacp import GACPDDPStrategy
from tests.strategies.models import (
    HIDDEN,
    VOCABULARY,
    Automatic,
    Manual,
    big_batch_gradients,
    count,
    loader,
    loss_of,
    make_net,
    masked_mean,
    quiet_trainer,
    ragged_batches,
    reference_run,
    relative_error,
)
from tests.strategies.on_ranks import on_ranks
from tests.strategies.test_gan import GAN, make_data, reference

# Other counts on each rank; rank 1 has no target at all in the second cycle of 3 (and rank 0 begins without one).
LENGTHS = ([0, 2, 7, 1, 5, 9, 3, 8, 4, 6], [1, 8, 3, 0, 0, 0, 2, 7, 7, 0])
BATCHES = [ragged_batches(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]
BOTH = [batch for pair in zip(*BATCHES, strict=True) for batch in pair]
MODULES = [
    pytest.param(Automatic, {}, id="automatic"),
    pytest.param(Manual, {}, id="manual"),
    pytest.param(Manual, {"trailing": True}, id="manual-zero_grad-last"),
]


class _Counted(GACPDDPStrategy):
    """Counts the all-reduces of gradient buckets (this model has one)."""

    reductions = 0

    def _register_ddp_hooks(self) -> None:
        def hook(state: Any, bucket: Any) -> Any:
            self.reductions += 1
            return allreduce_hook(state, bucket)

        # torch compares the annotations themselves, and here they would be strings
        hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}

        self.model.register_comm_hook(None, hook)  # type: ignore[union-attr,operator]


def train(rank: int, cls: Any, kwargs: Any, cycle: int, **options: Any) -> Any:
    module = cls(loss=masked_mean, dtype=torch.float64, **kwargs)
    strategy = _Counted(**{"accumulate_grad_batches": cycle, "num_items": "labels", **options})
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, detect_anomaly=False)
    trainer.fit(module, loader(BATCHES[rank]))
    assert strategy.cycle_result is not None
    return (
        [[g.numpy() for g in step] for step in module.seen],
        [p.detach().numpy() for p in module.parameters()],
        strategy.reductions,
        trainer.global_step,
        strategy.cycle_result.total_items,
    )


def check(results: Any, cycle: int, extra_reductions: int = 0) -> None:
    gradients, net = reference_run(BOTH, 2 * cycle, dtype=torch.float64)
    for seen, weights, reductions, steps, total_items in results:
        assert len(seen) == len(gradients)
        for found, expected in zip(seen, gradients, strict=True):
            assert relative_error([torch.from_numpy(g) for g in found], expected) < 1e-12
        assert relative_error([torch.from_numpy(w) for w in weights], list(net.parameters())) < 1e-12
        assert reductions == len(gradients) + extra_reductions
        assert steps == len(gradients)
        assert total_items == 6


@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_cycle_over_ranks_equals_one_big_batch(cls: Any, kwargs: Any, options: dict[str, Any], cycle: int) -> None:
    check(on_ranks(_with(options), cls, kwargs, cycle), cycle)


@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_static_graph(cls: Any, kwargs: Any, cycle: int) -> None:
    """torch learns the graph from the first backward, which is therefore reduced even inside a cycle."""
    check(on_ranks(_with({"static_graph": True}), cls, kwargs, cycle), cycle, extra_reductions=int(cycle > 1))


class _with:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, rank: int, *args: Any) -> Any:
        return train(rank, *args, **self.options)


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_ranks_that_weigh_the_same(cls: Any, kwargs: Any) -> None:
    """``average_across_ranks=False``: the mean over ranks of each rank's own mean over its items."""
    results = on_ranks(_with({"average_across_ranks": False}), cls, kwargs, 5)
    each = [reference_run(BATCHES[rank], 5, dtype=torch.float64)[0][0] for rank in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*each, strict=True)]
    for seen, *_ in results:
        assert relative_error([torch.from_numpy(g) for g in seen[0]], expected) < 1e-12


class _Branches:
    """A layer more, which only some micro-batches go through, and not the same ones on both ranks."""

    def __init__(self: Any, used: str) -> None:
        super().__init__(dtype=torch.float64)  # type: ignore[call-arg]
        torch.manual_seed(2)
        self.more = torch.nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
        self.used = used

    def loss_at(self: Any, batch: Any, rank: int, batch_idx: int) -> Any:
        here = {
            "inside a cycle": batch_idx % 4 == 1,
            "inside a cycle on one rank": batch_idx % 4 == 1 and rank == 0,
            "at the end on one rank": batch_idx % 4 == 3 and rank == 1,
            "in the first cycle": batch_idx < 4,
        }[self.used]

        def net(inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.net[:3](inputs)
            return self.net[3](hidden) + (self.more(hidden) if here else 0.0)

        return loss_of(net, batch)  # type: ignore[arg-type]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.loss = lambda _, batch: self.loss_at(batch, self.trainer.global_rank, batch_idx)
        return super().training_step(batch, batch_idx)  # type: ignore[misc]

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters()]
        self.seen.append(grads)


class _AutomaticBranches(_Branches, Automatic):
    pass


class _ManualBranches(_Branches, Manual):
    pass


WHERE = ["inside a cycle", "inside a cycle on one rank", "at the end on one rank", "in the first cycle"]


def _train_branches(rank: int) -> Any:
    found = {}
    for cls in (_AutomaticBranches, _ManualBranches):
        for used in WHERE:
            module = cls(used)
            strategy = _Counted(accumulate_grad_batches=4, num_items="labels", find_unused_parameters=True)
            trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
            trainer.fit(module, loader(BATCHES[rank]))
            found[cls, used] = [[g.numpy() for g in step] for step in module.seen], strategy.reductions
    return found


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_parameters_that_only_some_micro_batches_use_are_reduced() -> None:
    """pytorch 69031, 128949: what was used only where nothing is synchronised stayed apart, and the ranks diverged."""
    expected = {used: _steps_of(_AutomaticBranches(used)) for used in WHERE}
    for found in on_ranks(_train_branches):
        for (_, used), (seen, reductions) in found.items():
            assert len(seen) == reductions == 3
            for step, wanted in zip(seen, expected[used], strict=True):
                assert relative_error([torch.from_numpy(g) for g in step], wanted) < 1e-12


class _Idle:
    """A layer that no micro-batch goes through, and an optimizer that moves whatever has a gradient."""

    def __init__(self: Any) -> None:
        super().__init__(dtype=torch.float64, loss=masked_mean)  # type: ignore[call-arg]
        self.idle = torch.nn.Linear(2, 2, dtype=torch.float64)

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5)


class _AutomaticIdle(_Idle, Automatic):
    pass


class _ManualIdle(_Idle, Manual):
    pass


def _train_idle(rank: int) -> Any:
    found = []
    for cls in (_AutomaticIdle, _ManualIdle):
        module = cls()
        before = [p.detach().clone() for p in module.idle.parameters()]
        strategy = _Counted(accumulate_grad_batches=3, num_items="labels", find_unused_parameters=True)
        trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
        trainer.fit(module, loader(BATCHES[rank]))
        moved = any(not torch.equal(p, old) for p, old in zip(module.idle.parameters(), before, strict=True))
        found.append((moved, [[g.numpy() for g in step] for step in module.seen], strategy.reductions))
    return found


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_what_no_rank_uses_is_not_decayed_for_the_sake_of_a_micro_batch_without_items() -> None:
    """Rank 1 ends one cycle without a target, and has none at all in another: zeros are no gradient of what is idle."""
    net = make_net(torch.float64)
    gradients = []
    for start in range(0, len(BOTH), 6):
        gradients.append(big_batch_gradients(net, BOTH[start : start + 6]))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients[-1], strict=True):
                parameter -= 0.1 * (gradient + 0.5 * parameter)
    for found in on_ranks(_train_idle):
        for moved, seen, reductions in found:
            assert not moved
            assert len(seen) == reductions == len(gradients)
            for step, wanted in zip(seen, gradients, strict=True):
                assert relative_error([torch.from_numpy(g) for g in step], wanted) < 1e-12


def _steps_of(module: Any) -> list[list[torch.Tensor]]:
    """Plain SGD over both ranks' micro-batches of each cycle together."""
    steps = []
    for start in range(0, len(BATCHES[0]), 4):
        cycle = [(rank, i, BATCHES[rank][i]) for rank in range(2) for i in range(start, min(start + 4, 10))]
        losses = [module.loss_at(batch, rank, i) * count([batch]) for rank, i, batch in cycle if count([batch])]
        total = sum(losses) / count([batch for *_, batch in cycle])
        parameters = list(module.parameters())
        steps.append(list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, steps[-1], strict=True):
                parameter -= 0.1 * gradient
    return steps


def _train_gan(rank: int, order: str, cycle: int) -> Any:
    module = GAN(order)
    strategy = _Counted(accumulate_grad_batches=cycle, num_items="samples", find_unused_parameters=True)
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
    # Both ranks see the same batches: the reference on one rank then holds.
    trainer.fit(module, loader(make_data()))
    return [p.detach().numpy() for p in module.parameters()], strategy.reductions


@pytest.mark.parametrize("order", ["zero first", "critic first", "zero last"])
def test_gan_on_ranks(order: str) -> None:
    """Two backwards a micro-batch: two reductions a cycle, none inside it; the weights are those of one rank."""
    for weights, reductions in on_ranks(_train_gan, order, 3):
        expected = [p for net in reference(order, 3, 1) for p in net.parameters()]
        assert relative_error([torch.from_numpy(w) for w in weights], expected) < 1e-12
        assert reductions % 3 == 0 and 0 < reductions <= 2 * 2 * 3  # at most two buckets


def _grad_dtype(rank: int) -> str:
    trainer = quiet_trainer(strategy=GACPDDPStrategy(grad_dtype="float32"), devices=2)
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(Automatic(), loader(BATCHES[rank]))
    return str(caught.value)


def test_grad_dtype_is_refused() -> None:
    """Its reducer takes no other dtype; the error names what to use."""
    for message in on_ranks(_grad_dtype):
        assert "its reducer takes gradients in the parameter's dtype only" in message
        assert "bf16-mixed" in message
