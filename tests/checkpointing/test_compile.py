"""`torch.compile` around checkpointing, and inside."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from checkpointing.models import LM, AttentionBlock, MLPBlock, train
from lightning_gacp.checkpointing import checkpoint_blocks

TOKENS = torch.arange(12).view(3, 4) % 11

# Dynamo looks at the attribute itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


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


@pytest.mark.parametrize("block", [MLPBlock, AttentionBlock, BatchNormBlock])
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


@pytest.mark.parametrize("in_place", [True, False], ids=["block.compile()", "torch.compile(block)"])
def test_blocks_that_are_compiled_one_by_one(in_place: bool) -> None:
    plain = LM(MLPBlock, 3)
    checkpointed = copy.deepcopy(plain)
    counter = CompileCounterWithBackend("aot_eager")
    for index, layer in enumerate(checkpointed.layers):
        if in_place:
            layer.compile(backend=counter)
        else:
            checkpointed.layers[index] = torch.compile(layer, backend=counter)
    names = list(checkpointed.state_dict())
    applied = checkpoint_blocks(checkpointed)
    assert applied.names == ["layers.0", "layers.1", "layers.2"]
    assert list(checkpointed.state_dict()) == names
    found = {name.replace("_orig_mod.", ""): value for name, value in train(checkpointed, [TOKENS, TOKENS]).items()}
    assert_close(found, train(plain, [TOKENS, TOKENS]))
    assert counter.frame_count >= 1
    applied.remove()
    checkpointed(TOKENS).backward()


def test_a_compiled_model_is_searched_inside() -> None:
    model = torch.compile(LM(MLPBlock, 2), backend="eager")
    assert checkpoint_blocks(model).names == ["layers.0", "layers.1"]
