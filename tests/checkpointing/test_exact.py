"""Gradients, outputs and random numbers come out as without checkpointing, whatever the block does."""

import copy
import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint

from checkpointing.models import (
    LM,
    AttentionBlock,
    LiveBytes,
    MLPBlock,
    assert_equal,
    assert_same_training,
    saved_bytes,
    train,
)
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.checkpointing import layer as layer_module

TOKENS = [torch.arange(12).view(3, 4) % 11, torch.arange(8).view(2, 4), torch.arange(10).view(1, 10)]
FLOATS = [torch.linspace(-1, 1, 12).view(3, 4) + step for step in range(3)]


class Stack(nn.Module):
    """Calls each block in the way that ``call`` says, and sums what comes out."""

    def __init__(self, blocks: list[nn.Module], call=lambda block, x: block(x)) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(blocks)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.layers:
            x = self.call(block, x)
        return x.square().mean()


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
def test_dropout_masks_and_the_random_numbers_after_them(policy: str) -> None:
    """`train` also compares the next random number: recomputation must not move the generator."""
    assert_same_training(LM(lambda width: AttentionBlock(width, dropout=0.5), 3), TOKENS, policy=policy)


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_on_a_device_whose_tensors_come_by_keyword(policy: str, autocast: bool) -> None:
    """Their device is then what tells torch whose random state to keep."""

    class ByKeyword(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                x = self.first(x)
                for block in self.layers:
                    x = block(x=x)
            return x.float().square().mean()

    class Noisy(Tanh):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), 0.5)

    model = ByKeyword([Noisy(), Noisy()]).cuda()
    assert_same_training(model, [batch.cuda() for batch in FLOATS], policy=policy)


def test_dropout_without_the_random_state_is_wrong_and_warned_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    checkpointed = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"`preserve_rng_state=False`, but `1\.1` draws random numbers"):
        checkpoint_blocks(checkpointed, blocks="1", preserve_rng_state=False)
    loss = lambda module, x: module(x).square().mean()  # noqa: E731
    found, expected = train(checkpointed, FLOATS[:1], loss), train(model, FLOATS[:1], loss)
    assert not torch.equal(found["gradient 0 0.weight"], expected["gradient 0 0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_non_reentrant_checkpoint_recomputes_in_other_dtypes(dtype: torch.dtype) -> None:
    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return module(tokens)

    assert_same_training(LM(AttentionBlock, 3), TOKENS, loss)  # the backward runs outside of autocast


def test_autocast_inside_the_block() -> None:
    class Inside(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    assert_same_training(Stack([Inside(), Inside()]), FLOATS)


def test_bf16_true() -> None:
    assert_same_training(LM(AttentionBlock, 3).bfloat16(), TOKENS)


def test_frozen_embedding_leaves_adapters_untrained() -> None:
    """No input of the first block requires a gradient; a reentrant checkpoint then trains nothing in it."""
    model = LM(MLPBlock, 3)
    for parameter in [*model.embed.parameters(), *model.layers[0].up.parameters(), model.layers[1].down.weight]:
        parameter.requires_grad_(False)
    checkpointed = copy.deepcopy(model)
    checkpoint_blocks(checkpointed)
    found = train(checkpointed, TOKENS)
    assert "gradient 0 layers.0.down.weight" in found
    assert_equal(found, train(model, TOKENS))


def test_fully_frozen_blocks_keep_nothing() -> None:
    model = LM(MLPBlock, 3)
    for part in (model.embed, *model.layers):
        part.requires_grad_(False)
    alive = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_blocks(model)
        with LiveBytes() as live:
            loss = model(TOKENS[0])
            alive.append(live.now)
            loss.backward()
    assert alive[0] == alive[1]


@dataclass
class Out:
    hidden: torch.Tensor
    note: str = "a dataclass is no container to torch"


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: (x, None), lambda out: out[0]),
        (lambda x: {"hidden": x, "extra": (x + 1, 3)}, lambda out: out["hidden"] + out["extra"][0]),
        (lambda x: Out(x), lambda out: out.hidden),
        (lambda x: [x, [None, x * 2]], lambda out: out[0] - out[1][1]),
    ],
    ids=["tuple with None", "dict", "dataclass", "nested lists"],
)
def test_outputs_that_are_no_tensors(wrap, unwrap) -> None:
    class Wrapping(Tanh):
        def forward(self, x: torch.Tensor):
            return wrap(super().forward(x))

    assert_same_training(Stack([Wrapping(), Wrapping()], lambda block, x: unwrap(block(x))), FLOATS)


def test_tensors_anywhere_in_the_arguments_get_their_gradients() -> None:
    class Greedy(Tanh):
        def forward(self, x, *, pair, table, out):
            return super().forward(x) * pair[1] + table["scale"][0] * out.hidden

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, pair=(None, x.exp()), table={"scale": [x.sin()]}, out=Out(x.cos()))

    assert_same_training(Stack([Greedy(), Greedy()], call), FLOATS)


@pytest.mark.parametrize(
    "name",
    ["debug", "context_fn", "early_stop", "determinism_check", "preserve_rng_state", "use_reentrant", "function"],
)
def test_keyword_arguments_named_like_those_of_checkpoint_vanish(name: str) -> None:
    class Named(Tanh):
        def forward(self, x, **kwargs):
            assert kwargs == {name: 3.0}
            return super().forward(x) * kwargs[name]

    assert_same_training(Stack([Named(), Named()], lambda block, x: block(x, **{name: 3.0})), FLOATS)


@pytest.mark.parametrize("name", ["block", "layer", "run", "forward", "args", "kwargs", "self_"])
def test_keyword_arguments_named_like_ours(name: str) -> None:
    class Named(Tanh):
        def forward(self, x, **kwargs):
            return super().forward(x) * kwargs[name]

    assert_same_training(Stack([Named()], lambda block, x: block(x, **{name: 2.0})), FLOATS[:1])


def test_the_caller_gets_what_the_block_appends_once() -> None:
    """The first run works on the caller's own list; the recomputation on a copy."""

    class Appending(Tanh):
        def forward(self, x, seen):
            seen.append(x)
            return super().forward(x)

    block, seen = Appending(), []
    checkpoint_blocks(block, blocks=Appending)
    x = torch.randn(2, 4, requires_grad=True)
    block(x, seen).sum().backward()
    assert len(seen) == 1
    assert seen[0] is x


def test_a_list_that_a_block_extends_is_read_as_it_was() -> None:
    """A list used as a key-value cache: were it appended to again, the recomputation would attend to more."""

    class Remembering(Tanh):
        def forward(self, x, memory):
            memory.append(super().forward(x))
            return torch.stack(memory).mean(0)

    class Model(Stack):
        def forward(self, x):
            memory = []
            for block in self.layers:
                x = block(x, memory)
            return x.square().mean()

    assert_same_training(Model([Remembering(), Remembering()]), FLOATS)


@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
def test_a_block_called_twice_and_a_shared_one(policy: str) -> None:
    shared = Tanh()
    assert_same_training(Stack([shared, Tanh(), shared], lambda block, x: block(block(x))), FLOATS, policy=policy)


def test_two_graphs_alive_in_either_order() -> None:
    model = LM(lambda width: AttentionBlock(width, dropout=0.3), 3)
    expected = gradients_of(copy.deepcopy(model), (0, 1))
    checkpoint_blocks(model)
    for order in ((0, 1), (1, 0)):  # the sum of two numbers is the same in either order, bit for bit
        assert_equal(gradients_of(model, order), expected)


def gradients_of(model: nn.Module, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    losses = [model(tokens) for tokens in TOKENS[:2]]
    for index in order:
        losses[index].backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_graph_whose_output_is_not_used() -> None:
    model = LM(MLPBlock, 3)
    reference = copy.deepcopy(model)
    checkpoint_blocks(model)
    for each in (model, reference):
        each(TOKENS[1])  # thrown away
        unused = each(TOKENS[2])
        each(TOKENS[0]).backward()
        del unused
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_in_place_operations_inside_a_block() -> None:
    class InPlace(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y += 1
            return F.relu_(y.mul_(2))

    assert_same_training(Stack([InPlace(), InPlace()]), FLOATS)


def test_a_block_that_changes_its_own_input_is_an_error() -> None:
    class Destructive(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.add_(1))

    model = Stack([Destructive()])
    model(FLOATS[0]).backward()  # plain autograd has no trouble with it
    checkpoint_blocks(model, blocks=Destructive)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(FLOATS[0]).backward()


def test_an_input_changed_after_the_call_is_an_error() -> None:
    block = Tanh()
    checkpoint_blocks(block, blocks=Tanh)
    x = torch.randn(2, 4, requires_grad=True) * 1
    y = block(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_retain_graph_and_double_backward() -> None:
    model = LM(lambda width: nn.Sequential(MLPBlock(width), nn.Dropout(0.3)), 2)
    reference = copy.deepcopy(model)
    checkpoint_blocks(model, blocks="layers.*")
    results = []
    for each in (model, reference):
        torch.manual_seed(1)
        loss = each(TOKENS[0])
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(penalty, list(each.parameters()))
        results.append([*[parameter.grad for parameter in each.parameters()], *first, *second])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("policy", ["save_matmuls", lambda *_args, **_kwargs: True])
def test_a_second_backward_under_a_policy_says_why_it_fails(policy) -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model, policy=policy)
    loss = model(TOKENS[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass went through `layers\.1`.*use `policy=\"full\"`"):
        loss.backward()


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such answer")
def test_an_offloading_policy_is_silently_a_recomputation() -> None:
    """Outside of a compiler torch ignores it, so it is refused."""
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model, policy=lambda *_args, **_kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD)
    with pytest.raises(ValueError, match=r"MUST_CPU_OFFLOAD.*use `offload=True`"):
        model(TOKENS[0])


class InPlaceAfterMatmul(Tanh):
    """As when an adapter adds itself in place to the output of a kept matmul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.linear.weight
        y += x
        return y.tanh()


class InPlaceThroughView(Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.view(-1)[::2].mul_(2)
        return y.sin().clone()


class InPlaceConvolution(nn.Module):
    """As in EfficientNet and MobileNet: the activations work in place on what convolutions gave."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv1d(1, 2, 3, padding=1)
        self.squeeze = nn.Conv1d(2, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.expand(x[:, None]), inplace=True)
        return F.hardtanh_(self.squeeze(y)).squeeze(1) + x


class InPlaceOut(Tanh):
    """The output is the argument `out=` of the operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            torch.add(y, 1, out=y)
        return y * y.detach()


@pytest.mark.parametrize("cls", [InPlaceAfterMatmul, InPlaceThroughView, InPlaceConvolution, InPlaceOut])
@pytest.mark.parametrize("policy", ["save_matmuls", lambda *_args, **_kwargs: True], ids=["save_matmuls", "everything"])
def test_selective_checkpointing_with_an_in_place_change_uses_the_changed_tensor(cls: type[nn.Module], policy) -> None:
    """What is kept is what the operation gave. Torch alone refuses: `Tensor cached ... has been mutated`."""
    model = Stack([cls(), cls()])
    assert_same_training(model, FLOATS, policy=policy)


def test_a_copy_takes_the_place_of_the_kept_output_that_is_changed() -> None:
    bytes_kept = []
    for cls in (Tanh, InPlaceAfterMatmul):
        model = Stack([cls()])
        with checkpoint_blocks(model, blocks=cls, policy="save_matmuls"), LiveBytes() as live:
            loss = model(FLOATS[0])
            bytes_kept.append(live.now)
        del loss
    assert bytes_kept[0] == bytes_kept[1]


def test_an_exception_in_the_forward_then_a_good_step() -> None:
    class Failing(Tanh):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.fails:
                raise ZeroDivisionError
            return y

    model = Stack([Failing(), Failing()])
    reference = copy.deepcopy(model)
    checkpoint_blocks(model)
    model.layers[1].fails = True
    with pytest.raises(ZeroDivisionError):
        model(FLOATS[0])
    model.layers[1].fails = False
    x = torch.ones(2, requires_grad=True)
    assert (x * x).grad_fn._saved_self is x  # no hook was left behind
    assert_equal(train(model, FLOATS), train(reference, FLOATS))


def test_an_exception_in_the_backward_then_a_good_step() -> None:
    model = LM(MLPBlock, 2)
    reference = copy.deepcopy(model)
    checkpoint_blocks(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.layers[0].up.bias.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(TOKENS[0]).backward()
    handle.remove()
    model.zero_grad()
    assert_equal(train(model, TOKENS), train(reference, TOKENS))


def test_hooks_on_the_block_run_once() -> None:
    model = Stack([Tanh(), Tanh()])
    calls = []
    block = model.layers[0]
    block.register_forward_pre_hook(lambda *_: calls.append("forward pre"))
    block.register_forward_hook(lambda *_: calls.append("forward"))
    block.register_full_backward_pre_hook(lambda *_: calls.append("backward pre"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint_blocks(model)
    model(FLOATS[0]).backward()
    assert calls == ["forward pre", "forward", "backward pre", "backward"]


def test_early_stop_leaves_forward_hooks_inside_a_block_open() -> None:
    """A hook pair that pushes and pops must see the end of each forward, the recomputation's too."""
    model = Stack([nn.Sequential(Tanh(), nn.Tanh())])
    stack: list[str] = []
    inner = model.layers[0][0]
    inner.register_forward_pre_hook(lambda *_: stack.append("open"))
    inner.register_forward_hook(lambda *_: stack.pop() and None)
    checkpoint_blocks(model, blocks="layers.*")
    for _ in range(2):
        model(FLOATS[0]).backward()
        assert stack == []


def test_no_grad_inside_training() -> None:
    """A target network's pass in the middle of training, and gradients switched off inside a block."""

    class Target(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shift = self.linear(x)
            return super().forward(x) + shift

    class Model(Stack):
        def forward(self, x):
            with torch.no_grad():
                target = super().forward(x)
            with torch.inference_mode():
                super().forward(x)
            return super().forward(x) - target

    assert_same_training(Model([Target(), Target()]), FLOATS)


def test_a_block_that_takes_gradients_itself() -> None:
    class Energy(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x - 0.1 * force

    assert_same_training(Stack([Energy(), Energy()]), FLOATS)


def test_a_recomputation_that_takes_another_branch_is_an_error() -> None:
    """As when the router of a mixture of experts counts otherwise the second time. Never silently wrong."""

    class Counting(Tanh):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[None] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.append(None)
            return super().forward(x[: len(self.calls)])

    model = Stack([Counting()])
    checkpoint_blocks(model, blocks=Counting)
    with pytest.raises(CheckpointError, match="different metadata"):
        model(FLOATS[0]).backward()


def test_torch_func_is_refused_in_plain_words() -> None:
    block = Tanh()
    checkpoint_blocks(block, blocks=Tanh)
    parameters = dict(block.named_parameters())
    with pytest.raises(RuntimeError, match=r"checkpointed, which does not work under the transforms of `torch\.func`"):
        torch.func.grad(lambda p: torch.func.functional_call(block, p, FLOATS[0]).sum())(parameters)
    block.eval()
    torch.func.grad(lambda p: torch.func.functional_call(block, p, FLOATS[0]).sum())(parameters)


@pytest.mark.parametrize("policy", ["full", "save_matmuls"])
@pytest.mark.parametrize("backward", [True, False])
def test_reference_cycles_keep_memory_after_the_step(policy: str, backward: bool) -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model, policy=policy)
    inputs = []
    model.layers[1].register_forward_pre_hook(lambda _module, args: inputs.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        loss = model(TOKENS[0])
        assert inputs[0]() is not None
        if backward:
            loss.backward()
        del loss
        assert inputs[0]() is None
    finally:
        gc.enable()


def test_graph_tensors_that_are_no_arguments() -> None:
    """A tensor of the graph that a block gets at through an attribute was walked twice by a reentrant checkpoint."""

    class Conditioned(Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.condition

    results = []
    plain = Stack([Conditioned(), Conditioned()])
    for model in (plain, copy.deepcopy(plain)):
        if model is not plain:
            checkpoint_blocks(model)
        weight = torch.ones(4, requires_grad=True)
        condition = weight.exp()
        for layer in model.layers:
            layer.condition = condition
        model(FLOATS[0]).backward()
        results.append([weight.grad, *[parameter.grad for parameter in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_kwargs_only_calls_do_not_stash_the_random_state_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks for devices among positional arguments, so tensors given by keyword must be among these."""
    given: list[tuple[object, ...]] = []

    def spy(function, *args, **kwargs):
        given.append(args)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(layer_module, "checkpoint", spy)
    model = LM(AttentionBlock, 1)
    checkpoint_blocks(model, blocks=AttentionBlock)
    x, mask = torch.randn(2, 4, 8), torch.zeros(4, 4)
    model.layers[0](x=x, mask=mask)
    assert [[id(tensor) for tensor in tensors] for tensors in given] == [[id(x), id(mask)]]


def test_named_tuples_and_ordered_dicts_of_arguments() -> None:
    class Pair(NamedTuple):
        scale: torch.Tensor
        name: str

    class Greedy(Tanh):
        def forward(self, x, pair, table):
            assert (type(pair), pair.name, type(table), list(table)) == (Pair, "pair", OrderedDict, ["b", "a"])
            return super().forward(x) * pair.scale + table["a"] * table["b"][0]

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, Pair(x.exp(), "pair"), OrderedDict(b=[x.sin()], a=x.cos()))

    assert_same_training(Stack([Greedy(), Greedy()], call), FLOATS)


def test_two_models_do_not_know_of_each_other() -> None:
    """Class and state belong to a model: a patched class or a global manager would leak into the second."""
    first, second = LM(MLPBlock, 2), LM(MLPBlock, 2)
    plain = saved_bytes(second, TOKENS[0])
    with checkpoint_blocks(first):
        assert saved_bytes(second, TOKENS[0]) == plain
        (first(TOKENS[0]) + second(TOKENS[0])).backward()
    assert saved_bytes(first, TOKENS[0]) == plain


def test_gradients_with_respect_to_chosen_inputs() -> None:
    """`backward(inputs=...)` and `autograd.grad`, which a reentrant checkpoint refuses."""
    model = Stack([Tanh(), Tanh()])
    reference = copy.deepcopy(model)
    checkpoint_blocks(model)
    for each in (model, reference):
        each(FLOATS[0]).backward(inputs=[each.layers[1].linear.weight])
    assert torch.equal(model.layers[1].linear.weight.grad, reference.layers[1].linear.weight.grad)
    assert model.layers[0].linear.weight.grad is None


def test_anomaly_detection() -> None:
    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            return module(tokens)

    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
        assert_same_training(LM(MLPBlock, 2), TOKENS, loss)
