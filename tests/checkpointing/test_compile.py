"""`torch.compile` around checkpointing, and inside."""

import copy

import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from checkpointing.models import LM, AttentionBlock, MLPBlock, assert_equal, saved_bytes, train
from checkpointing.test_buffers import (
    BATCHES,
    AssignedMean,
    Attributes,
    Block,
    DataMean,
    Quantiser,
    RunningMean,
    SharedBuffers,
)
from checkpointing.test_buffers import loss as square
from lightning_gacp.checkpointing import arguments, checkpoint_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.wrapping import layer_of

TOKENS = torch.arange(12).view(3, 4) % 11

# Dynamo looks at the attribute itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _forget_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_warned", set())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class BatchNormBlock(MLPBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("block", [AttentionBlock, BatchNormBlock])
def test_a_whole_model_is_one_graph(block: type[nn.Module]) -> None:
    plain = LM(block, 3)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, every_n_layers=2)
    counter = CompileCounterWithBackend("aot_eager")
    checkpointed.compile(backend=counter, fullgraph=True)
    assert_close(train(checkpointed, [TOKENS, TOKENS]), train(plain, [TOKENS, TOKENS]))
    assert counter.frame_count == 1


def test_the_compiled_graph_recomputes() -> None:
    """The products of the checkpointed blocks appear a second time in the backward graph."""
    counts = []
    for settings in (None, {}, {"every_n_layers": 2}):
        torch._dynamo.reset()
        model = LM(MLPBlock, 4)
        if settings is not None:
            checkpoint_blocks(model, **settings)
        counts.append(products_in_backward(model))
    assert counts[0] < counts[2] < counts[1]  # the partitioner may add products of its own


def products_in_backward(model: nn.Module) -> int:
    found = []

    def note(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        found.append(sum(str(node.target).startswith(("aten.mm", "aten.addmm")) for node in graph.graph.nodes))
        return graph

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, inputs: make_boxed_func(note(graph, inputs).forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, backend=backend, fullgraph=True)(TOKENS).backward()
    (count,) = found
    return count


class NoisyBatchNormBlock(BatchNormBlock):
    """State that must move once, and random numbers that must come again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


def compiled(model: nn.Module, way: str, backend: object) -> nn.Module:
    if way == "model.compile()":
        model.compile(backend=backend)
    elif way == "torch.compile(model)":
        model = torch.compile(model, backend=backend)
    for index, layer in enumerate(model.layers):
        if way == "block.compile()":
            layer.compile(backend=backend)
        elif way == "torch.compile(block)":
            model.layers[index] = torch.compile(layer, backend=backend)
    return model


WAYS = ["model.compile()", "torch.compile(model)", "block.compile()", "torch.compile(block)"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("compiled_first", "policy"), [(True, "full"), (False, "full"), (False, "save_matmuls")])
def test_each_way_to_compile_is_one_graph_and_bit_equal(way: str, compiled_first: bool, policy: str) -> None:
    """The compiler works inside of the checkpoint or sees through it; three blocks share one graph."""
    plain = LM(NoisyBatchNormBlock, 3)
    checkpointed = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    if compiled_first:
        checkpointed = compiled(checkpointed, way, counter)
    applied = checkpoint_blocks(checkpointed, policy=policy)
    if not compiled_first:
        checkpointed = compiled(checkpointed, way, counter)
    assert applied.names == ["layers.0", "layers.1", "layers.2"]
    found = train(checkpointed, [TOKENS, TOKENS])
    assert_equal({name.replace("_orig_mod.", ""): value for name, value in found.items()}, train(plain, [TOKENS] * 2))
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("cls", [RunningMean, AssignedMean, DataMean, Attributes, Quantiser, SharedBuffers])
@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_buffers_that_a_compiled_block_changes(cls: type[Block], way: str) -> None:
    """A compiler that sees through the checkpoint would recompute with the changed ones: wrong gradients, silently."""
    plain = nn.Sequential(nn.Linear(4, 4), cls(), cls())
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, blocks=cls)
    for module in [checkpointed] if way == "whole" else checkpointed[1:]:
        module.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="`1` is checkpointed and not compiled: it has buffers") as caught:
        found = train(checkpointed, BATCHES, square)
    assert len(caught) == 1  # for both blocks
    assert_close(found, train(plain, BATCHES, square))


def test_a_list_that_a_compiled_block_extends() -> None:
    class Appending(MLPBlock):
        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
            seen.append(x)
            return super().forward(x)

    block = Appending(8)
    checkpoint_blocks(block, blocks=Appending)
    block.compile(backend="aot_eager")
    seen: list[torch.Tensor] = []
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.warns(UserWarning, match="is checkpointed and not compiled: .*is given lists"):
        block(x, seen).sum().backward()
    assert len(seen) == 1
    assert seen[0] is x


def test_fullgraph_says_why_a_block_breaks_it() -> None:
    model = nn.Sequential(RunningMean())
    checkpoint_blocks(model, blocks=RunningMean)
    with pytest.raises(Unsupported, match="forward may change its buffers"):
        torch.compile(model, backend="eager", fullgraph=True)(BATCHES[0])


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_follows_what_is_applied_and_removed(way: str) -> None:
    """Also when it has run before: a compiled graph without recomputation must not stay in use."""
    model = LM(MLPBlock, 3)
    eager = {False: saved_bytes(model, TOKENS)}
    with checkpoint_blocks(model):
        eager[True] = saved_bytes(model, TOKENS)
    model = compiled(model, way, "aot_eager")
    for _ in range(2):
        assert saved_bytes(model, TOKENS) > 2 * eager[True]
        with checkpoint_blocks(model):
            assert saved_bytes(model, TOKENS) <= eager[True]  # a partitioner may find less to keep
    assert 2 * eager[True] < eager[False]


@pytest.mark.parametrize("way", WAYS)
def test_weights_changed_before_the_backward_of_compiled_code(way: str) -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model)
    loss = compiled(model, way, "aot_eager")(TOKENS)
    with torch.no_grad():
        model.layers[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled, checkpointed", "checkpointed, compiled"])
def test_saved_tensor_hooks_compile_nothing(way: str, compiled_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload takes the inputs of the blocks from outside of the compiled code, and the blocks are compiled."""
    device = SimulatedDevice()
    monkeypatch.setattr(AcceleratorDevice, "find", lambda: device)
    plain = LM(MLPBlock, 3)
    model = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    if compiled_first:
        model = compiled(model, way, counter)
    applied = checkpoint_blocks(model, offload=True)
    for part in model.modules():
        if layer_of(part, "offload") is not None:
            layer_of(part, "offload").min_bytes = 1
    if not compiled_first:
        model = compiled(model, way, counter)
    found = train(model, [TOKENS, TOKENS])
    assert_equal({name.replace("_orig_mod.", ""): value for name, value in found.items()}, train(plain, [TOKENS] * 2))
    (graph,) = counter.graphs  # for all three blocks, each a whole checkpoint
    assert sum("tag_activation_checkpoint" in str(node.target) for node in graph.graph.nodes) == 1
    assert applied.engine.stats()["offloaded_tensors"] == 2 * 2  # of the last block nothing
    assert applied.engine.stats()["live_records"] == 0


def test_a_compiled_model_is_searched_inside() -> None:
    model = torch.compile(LM(MLPBlock, 2), backend="eager")
    assert checkpoint_blocks(model).names == ["layers.0", "layers.1"]


@pytest.mark.parametrize("which", ["block", "inside"])
def test_graphs_for_several_shapes_alive_at_once_are_recomputed_by_their_own(which: str) -> None:
    """pytorch#166926: by the time of a recomputation the compiler's newest graph is that of another shape."""
    plain = LM(AttentionBlock, 3)
    checkpointed = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    for block in checkpointed.layers:
        (block if which == "block" else block.mlp).compile(backend=counter)  # torch compiles no layers of its own
    checkpoint_blocks(checkpointed)
    found = []
    for model in (plain, checkpointed):
        losses = [model(TOKENS[:, :width]) for width in (2, 3, 4)]
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert counter.frame_count > 1
    assert_equal(found[1], found[0])
