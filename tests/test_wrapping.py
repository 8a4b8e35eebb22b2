"""A wrapped module behaves as before from outside, and is given back as it was."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_gacp.wrapping import ROLES, Applied, layer_of, unwrap, wrap


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return factor * self.linear(x)


class Spy:
    """Notes its name when it is called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def __call__(self, block, forward, args, kwargs):
        self.calls.append(f"{self.name} in")
        out = forward(*args, **kwargs)
        self.calls.append(f"{self.name} out")
        return out

    def __deepcopy__(self, memo):
        return Spy(f"copied {self.name}", self.calls)


class Refusing(nn.Module):
    def __init_subclass__(cls, **kwargs: object) -> None:
        raise RuntimeError("final")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_layers_run_from_outside_to_inside_whatever_the_order_of_wrapping() -> None:
    for order in (ROLES, ROLES[::-1]):
        block, calls = Doubling(), []
        for role in order:
            wrap(block, role, Spy(role, calls))
        x = torch.randn(2, 3)
        assert torch.equal(block(x, factor=3.0), 3.0 * block.linear(x))
        assert calls == ["offload in", "checkpoint in", "checkpoint out", "offload out"]


def test_nothing_changes_from_outside() -> None:
    model = nn.Sequential(Doubling(), Doubling())
    before = (
        list(model.state_dict()),
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_modules()],
        repr(model),
    )
    wrap(model[0], "checkpoint", Spy("", []))
    after = (
        list(model.state_dict()),
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_modules()],
        repr(model),
    )
    assert before == after
    assert isinstance(model[0], Doubling)
    assert type(model[0]).__name__ == "Doubling"
    assert type(model[0]).__qualname__ == Doubling.__qualname__
    assert type(model[0]).__module__ == Doubling.__module__


def test_unwrap_gives_the_class_back_with_the_last_role() -> None:
    block = Doubling()
    attributes = set(block.__dict__)
    wrap(block, "checkpoint", Spy("c", []))
    wrap(block, "offload", Spy("o", []))
    unwrap(block, "checkpoint")
    assert type(block) is not Doubling
    assert layer_of(block, "checkpoint") is None
    assert layer_of(block, "offload") is not None
    unwrap(block, "offload")
    assert type(block) is Doubling
    assert set(block.__dict__) == attributes
    unwrap(block, "offload")  # a second time does nothing
    assert type(block) is Doubling


def test_blocks_of_one_class_share_one_generated_class_but_not_their_layers() -> None:
    first, second, calls = Doubling(), Doubling(), []
    wrap(first, "checkpoint", Spy("first", calls))
    wrap(second, "offload", Spy("second", calls))
    assert type(first) is type(second)
    first(torch.randn(1, 3))
    assert calls == ["first in", "first out"]


def test_a_deep_copy_runs_its_own_weights_through_its_own_layer() -> None:
    """Weight averaging makes such copies; a `forward` patched onto the instance would run the original weights."""
    calls: list[str] = []
    model = nn.Sequential(Doubling())
    wrap(model[0], "checkpoint", Spy("spy", calls))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].linear.weight.zero_()
        copied[0].linear.bias.zero_()
    x = torch.randn(2, 3)
    assert copied(x).abs().max() == 0
    assert calls == ["copied spy in", "copied spy out"]
    assert model(x).abs().max() > 0
    unwrap(copied[0], "checkpoint")
    assert type(copied[0]) is Doubling
    assert layer_of(model[0], "checkpoint") is not None


def test_deep_copy_keeps_shared_modules_shared() -> None:
    shared = Doubling()
    wrap(shared, "checkpoint", Spy("", []))
    copied = copy.deepcopy(nn.ModuleList([shared, shared]))
    assert copied[0] is copied[1]
    assert copied[0] is not shared


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_a_plain_module(protocol: int) -> None:
    block = Doubling()
    wrap(block, "checkpoint", Spy("", []))
    data = pickle.dumps(block, protocol)
    loaded = pickle.loads(data)
    assert type(loaded) is Doubling
    assert b"lightning_gacp" not in data
    assert layer_of(loaded, "checkpoint") is None
    x = torch.randn(2, 3)
    assert torch.equal(loaded(x), block(x))


def test_torch_save_of_a_whole_model() -> None:
    model = nn.Sequential(Doubling())
    wrap(model[0], "checkpoint", Spy("", []))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.randn(2, 3)
    assert torch.equal(loaded(x), model(x))


def test_hooks_stay_outside() -> None:
    block, calls = Doubling(), []
    block.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    block.register_forward_hook(lambda *_: calls.append("hook"))
    wrap(block, "checkpoint", Spy("layer", calls))
    block(torch.randn(1, 3))
    assert calls == ["pre-hook", "layer in", "layer out", "hook"]


def test_parametrized_after_wrapping_keeps_working() -> None:
    """`parametrize` puts its own class on top; taking the layer off must not take that class away."""
    block, calls = nn.Linear(3, 3), []
    wrap(block, "checkpoint", Spy("spy", calls))
    parametrizations.orthogonal(block)
    x = torch.randn(1, 3)
    expected = nn.functional.linear(x, block.weight, block.bias)
    assert torch.equal(block(x), expected)
    assert calls == ["spy in", "spy out"]
    unwrap(block, "checkpoint")
    assert parametrize.is_parametrized(block)
    assert torch.equal(block(x), expected)
    assert calls == ["spy in", "spy out"]
    wrap(block, "checkpoint", Spy("again", calls))  # below the parametrization, where our class still is
    block(x)
    assert calls[2:] == ["again in", "again out"]


def test_errors_name_the_class_and_change_nothing() -> None:
    patched = Doubling()
    patched.forward = patched.forward
    with pytest.raises(ValueError, match=r"`Doubling\.forward` was replaced on the instance"):
        wrap(patched, "checkpoint", Spy("", []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, but models made by it are around
        traced = torch.jit.trace(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(ValueError, match="ScriptModule"):
        wrap(traced, "checkpoint", Spy("", []))
    with pytest.raises(ValueError, match="is parametrized itself"):
        wrap(parametrizations.orthogonal(nn.Linear(3, 3)), "checkpoint", Spy("", []))
    final = Refusing()
    with pytest.raises(TypeError, match=r"`Refusing` cannot be subclassed.*final"):
        wrap(final, "checkpoint", Spy("", []))
    assert type(final) is Refusing
    with pytest.raises(ValueError, match="`role='compress'` must be one of"):
        wrap(Doubling(), "compress", Spy("", []))
    twice = Doubling()
    wrap(twice, "checkpoint", Spy("", []))
    with pytest.raises(ValueError, match="has a `checkpoint` layer already"):
        wrap(twice, "checkpoint", Spy("", []))


def test_an_exception_in_the_forward_passes_through() -> None:
    block = Doubling()
    wrap(block, "checkpoint", Spy("", []))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(1, 7))
    assert block(torch.randn(1, 3)).shape == (1, 3)


def test_a_class_with_its_own_deepcopy_keeps_it() -> None:
    class Own(Doubling):
        def __deepcopy__(self, memo):
            return "mine"

    block = Own()
    wrap(block, "checkpoint", Spy("", []))
    assert copy.deepcopy(block) == "mine"


class Reducing(Doubling):
    """Says itself how it is made again, without a state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.seed = seed

    def __reduce__(self):
        return Reducing, (self.seed,)


def test_a_class_that_says_itself_how_it_is_pickled() -> None:
    block, calls = Reducing(3), []
    wrap(block, "checkpoint", Spy("spy", calls))
    x = torch.randn(1, 3)
    copied, loaded = copy.deepcopy(block), pickle.loads(pickle.dumps(block))
    assert torch.equal(copied(x), loaded(x))
    assert calls == ["copied spy in", "copied spy out"]
    assert type(loaded) is Reducing


def test_applied_undoes_once_also_after_an_exception() -> None:
    undone: list[str] = []
    applied = Applied(["a"], lambda: undone.append("a"))
    with pytest.raises(KeyError), applied as inside:
        assert inside is applied
        assert applied.names == ["a"]
        raise KeyError
    applied.remove()
    assert undone == ["a"]
