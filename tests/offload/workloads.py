"""Programs that use the offload engine in every way it allows, to be run under any schedule.

Each takes a simulated device, random numbers, and returns what is wrong, besides the races that the device has seen:
the differences from the same program without offload. Programs that use several compute streams order them as a
careful user would: what one stream made is waited for by another that uses it, and memory outlives its last reader.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_gacp.blocks import find_blocks
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import AppliedOffload, offload_selected
from lightning_gacp.offload.device import Site

from .models import MODELS, Adapter, batch, build, gradients, same
from .simulated import SimulatedDevice

Workload = Callable[[SimulatedDevice, random.Random], Iterator[str]]
WORKLOADS: dict[str, Workload] = {}
"""By the name of the function."""


def workload(function: Workload) -> Workload:
    WORKLOADS[function.__name__] = function
    return function


def run(name: str, seed: int, disabled: frozenset[Site] = frozenset()) -> list[str]:
    """Run a workload under the schedule of ``seed``, and return everything that is wrong."""
    return run_on(SimulatedDevice(seed, disabled), name, seed)


def run_on(device: SimulatedDevice, name: str, seed: int) -> list[str]:
    """Run a workload on ``device``, and return everything that is wrong."""
    torch.manual_seed(seed)
    try:
        problems = list(WORKLOADS[name](device, random.Random(f"{name} {seed}")))
    except Exception as error:  # with a site disabled, anything may happen
        if not device.disabled:
            raise
        problems = [f"{type(error).__name__}: {error}"]
    device.finish()
    return problems + device.races


def offloaded(model: nn.Module, patterns: list[str], device: SimulatedDevice, chance: random.Random) -> AppliedOffload:
    """Offload a model with settings drawn at random."""
    return offload_selected(
        model,
        find_blocks(model, patterns),
        min_bytes=chance.choice((1, 64)),
        keep_last=chance.choice((0, 0, 1)),
        prefetch=chance.choice((0, 1, 1, 2)),
        device=device.back_end,
    )


def wrong(what: str, one: Tensor, other: Tensor) -> Iterator[str]:
    if not torch.equal(one, other):
        yield f"{what} is off by {(one - other).abs().max()}"


# Training of whole models


def _training(name: str) -> Workload:
    def train(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
        plain, model = build(name), build(name)
        patterns = MODELS[name][1]
        inputs_only = chance.random() < 0.5
        if inputs_only:
            checkpoint_blocks(model, blocks=patterns)
        offloaded(model, patterns, device, chance)
        for step in range(2):
            tokens = batch(step, chance.choice((3, 5)))
            plain(tokens).square().sum().backward()
            with device:
                model(tokens).square().sum().backward()
            if not same(gradients(plain), gradients(model)):
                yield f"gradients of step {step} differ"

    return train


for _name in MODELS:
    WORKLOADS[f"train {_name}"] = _training(_name)


# One stack of blocks, walked by hand


class Stack:
    """Three offloaded blocks, and three without offload that have the same weights."""

    def __init__(self, device: SimulatedDevice, chance: random.Random) -> None:
        torch.manual_seed(2)
        self.plain = nn.ModuleList(Adapter() for _ in range(4))
        self.model = nn.ModuleList(Adapter() for _ in range(4))
        self.model.load_state_dict(self.plain.state_dict())
        self.applied = offloaded(self.model, ["*"], device, chance)

    def graph(self, seed: int) -> tuple[Graph, Graph]:
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
        return Graph(self.plain, x), Graph(self.model, x)


class Graph:
    """The forward of a stack, whose backward is done block by block.

    The weights get no gradients, so that independent graphs share nothing that is written.
    """

    def __init__(self, blocks: nn.ModuleList, x: Tensor) -> None:
        self.points = [x.clone().requires_grad_()]
        self.blocks = blocks
        self.gradient: Tensor | None = None

    def forward(self) -> Graph:
        for block in self.blocks:
            # Each block gets a leaf, so that its backward can be run by itself.
            self.points.append(block(self.points[-1]))
        self.gradient = torch.ones_like(self.points[-1])
        return self

    def back(self, keep: bool = False) -> None:
        """The backward of the last block that is left."""
        end, start = self.points[-1], self.points[-2]
        (self.gradient,) = torch.autograd.grad(end, start, self.gradient, retain_graph=keep)
        self.points.pop()

    @property
    def left(self) -> int:
        return len(self.points) - 1

    def finish(self) -> Tensor:
        while self.left:
            self.back()
        assert self.gradient is not None
        return self.gradient


@workload
def several_graphs(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """Graphs are alive together, go forward and backward in any order, and some die half-way."""
    stack = Stack(device, chance)
    for _ in range(2):
        pairs = [stack.graph(seed) for seed in range(3)]
        for plain, _ in pairs:
            plain.forward()
        started: list[Graph] = []
        waiting = [graph for _, graph in pairs]
        with device:
            while waiting or any(graph.left for graph in started):
                going = [graph for graph in started if graph.left]
                if waiting and (not going or chance.random() < 0.5):
                    started.append(waiting.pop(0).forward())
                else:
                    chance.choice(going).back()
                    if chance.random() < 0.05:
                        dropped = started.index(chance.choice(going))
                        del pairs[dropped], started[dropped]
                        going.clear()
        for plain, graph in pairs:
            yield from wrong("the input's gradient", plain.finish(), graph.finish())


@workload
def forward_only(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """Graphs die without a backward, right after it has begun, or when it is half done."""
    stack = Stack(device, chance)
    for seed in range(4):
        with device:
            _, graph = stack.graph(seed)
            graph.forward()
            for _ in range(chance.randrange(3)):
                graph.back()
            del graph
    plain, graph = stack.graph(9)
    with device:
        graph.forward().finish()
    yield from wrong("the input's gradient", plain.forward().finish(), graph.finish())


@workload
def retained_graph(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """A graph goes backward several times, with other work between."""
    stack = Stack(device, chance)
    plain, graph = stack.graph(0)
    (expected,) = torch.autograd.grad(plain.forward().points[-1].sin().sum(), plain.points[0])
    with device:
        end = graph.forward().points[-1].sin().sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(end, graph.points[0], retain_graph=True)
            yield from wrong("a repeated gradient", expected, found)
            if chance.random() < 0.5:
                stack.graph(1)[1].forward().finish()
        del graph, end


@workload
def double_backward(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """A gradient penalty."""
    stack = Stack(device, chance)

    def penalty(graph: Graph) -> Tensor:
        end = graph.forward().points[-1].square().sum()
        (first,) = torch.autograd.grad(end, graph.points[0], create_graph=True)
        return torch.autograd.grad(first.square().sum() + end, graph.points[0])[0]

    expected = penalty(stack.graph(0)[0])
    with device:
        for _ in range(2):
            yield from wrong("the second gradient", expected, penalty(stack.graph(0)[1]))


@workload
def two_streams(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """Independent work on two compute streams that nothing orders shares the engine."""
    stack = Stack(device, chance)
    streams = [device.default_stream, device.compute_stream()]
    pairs: list[tuple[Graph, Graph] | None] = [None, None]
    for turn in range(24):
        at = chance.randrange(2)
        pair = pairs[at]
        if pair is None:
            pairs[at] = pair = stack.graph(turn)
            with device, device.on(streams[at]):
                pair[1].forward()
        elif pair[1].left:
            with device, device.on(streams[at]):
                pair[1].back()
        else:
            yield from wrong("the input's gradient", pair[0].forward().finish(), pair[1].finish())
            pairs[at] = None
        del pair


@workload
def backward_changes_stream(device: SimulatedDevice, chance: random.Random) -> Iterator[str]:
    """Each block's backward runs on one of two streams, as when a block uses a stream of its own inside."""
    stack = Stack(device, chance)
    one, other = device.default_stream, device.compute_stream()
    for seed in range(3):
        plain, graph = stack.graph(seed)
        with device:
            now = one
            with device.on(one):
                graph.forward()
            alive = list(graph.points)  # what one stream made stays while the other may read it
            gradients = [graph.gradient]
            while graph.left:
                following = chance.choice((one, other))
                if following is not now:
                    device.order(following, now)
                now = following
                with device.on(now):
                    graph.back(keep=True)
                gradients.append(graph.gradient)
            device.order(one, other)
            device.order(other, one)
            alive.clear()
            gradients.clear()
        yield from wrong("the input's gradient", plain.forward().finish(), graph.finish())
        del graph
