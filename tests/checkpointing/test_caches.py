"""Key-value caches: a recomputation must not write what the forward has written."""

import copy
import warnings

import pytest
import torch
from torch import nn

from checkpointing.families import TRANSFORMERS, loss_of
from checkpointing.models import assert_equal, saved_bytes, train
from lightning_gacp.checkpointing import arguments, checkpoint_blocks


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_warned", set())


class KeyCache:
    """Grows by what each layer writes."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        if layer in self.keys:
            keys = torch.cat([self.keys[layer], keys], 1)
        self.keys[layer] = keys
        return keys

    def get_seq_length(self, layer: int = 0) -> int:
        return self.keys[layer].shape[1] if layer in self.keys else 0


class Layer(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(4, 4)

    def forward(self, x, past_key_values=None, use_cache=False):
        assert (past_key_values is not None) == use_cache
        keys = torch.tanh(self.linear(x))
        if past_key_values is not None:
            keys = past_key_values.update(self.layer_idx, keys)
        return x + keys.mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.by_keyword = by_keyword
        self.layers = nn.ModuleList([Layer(index) for index in range(3)])

    def forward(self, x, cache=None):
        for layer in self.layers:
            if self.by_keyword:
                x = layer(x, past_key_values=cache, use_cache=cache is not None)
            else:
                x = layer(x, cache, use_cache=cache is not None)
        return x.square().mean()


X = torch.linspace(-1, 1, 24).view(2, 3, 4)


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_an_empty_cache_is_filled_twice(by_keyword: bool, every_n_layers: int) -> None:
    """It is switched off for the checkpointed blocks, with one warning for all of them."""
    plain = Model(by_keyword)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, every_n_layers)
    cache = KeyCache()
    with pytest.warns(UserWarning, match=r"`layers\.0` was called in training with a key-value cache") as caught:
        found = train(checkpointed, [X], lambda module, x: module(x, cache))
    assert len(caught) == 1
    assert_equal(found, train(plain, [X]))
    assert list(cache.keys) == [index for index in range(3) if index % every_n_layers]


def test_a_cache_that_has_content_is_read() -> None:
    """As with prefix tuning. The blocks then run without checkpointing and compute what was asked for; that is said."""
    plain = Model(True)
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed)

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        cache = KeyCache()
        cache.keys = {index: torch.ones(2, 5, 4) for index in range(3)}
        return module(x, cache)

    with pytest.warns(UserWarning, match="cache that has content.*runs without checkpointing") as caught:
        found = train(checkpointed, [X, X], loss)
    assert len(caught) == 1
    assert_equal(found, train(plain, [X, X], loss))


class StateCache:
    """The states of linear attention, which have no length."""

    def __init__(self, **states: object) -> None:
        self.states = states
        self.layers_seen: list[int] = []

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        self.layers_seen.append(layer)
        return keys + self.states.get("before", 0.0)


@pytest.mark.parametrize(
    ("states", "message"),
    [({}, "Checkpointed blocks run without it"), ({"before": torch.ones(1)}, "runs without checkpointing")],
)
def test_a_cache_without_a_length_is_searched_for_tensors(states: dict, message: str) -> None:
    model = Model(True)
    checkpoint_blocks(model)
    cache = StateCache(**states)
    with pytest.warns(UserWarning, match=message):
        model(X, cache).backward()
    assert cache.layers_seen == ([0, 1, 2] if states else [])


def test_evaluation_keeps_the_cache() -> None:
    model = Model(True).eval()
    checkpoint_blocks(model)
    cache = KeyCache()
    model(X, cache)
    assert [cache.get_seq_length(index) for index in range(3)] == [3, 3, 3]
    model.train()
    with torch.no_grad():
        model(X, cache)
    assert [cache.get_seq_length(index) for index in range(3)] == [6, 6, 6]


def test_pairs_of_tensors_are_no_objects_to_write_to() -> None:
    """The older form of a cache: the block returns a longer one. Nothing is switched off."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, layer_past=None):
            keys = torch.tanh(self.linear(x))
            present = keys if layer_past is None else torch.cat([layer_past[0], keys], 1)
            return x + present.mean(1, keepdim=True), (present,)

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([Returning() for _ in range(2)])

        def forward(self, x):
            past = None
            for block in self.h:
                x, past = block(x, layer_past=past)
            return x.square().mean()

    plain = Old()
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed)
    assert_equal(train(checkpointed, [X]), train(plain, [X]))


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Qwen3-MoE", "Whisper", "LFM2 (convolutions and attention)"])
def test_transformers_models_that_use_their_cache_by_default(family: str) -> None:
    """Also with layers whose cache has no length: it must not be taken for one that has content."""
    plain = TRANSFORMERS[family].make()
    batch = TRANSFORMERS[family].batch()
    bytes_without_cache = []
    for use_cache in (False, True):
        checkpointed = copy.deepcopy(plain)
        checkpointed.config.use_cache = use_cache
        checkpoint_blocks(checkpointed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bytes_without_cache.append(saved_bytes(checkpointed, **batch))
            found = train(checkpointed, [batch], loss_of)
        assert ["key-value cache" in str(warning.message) for warning in caught] == [True] * use_cache
        assert_equal(found, train(copy.deepcopy(plain), [batch], loss_of))
    assert bytes_without_cache[0] == bytes_without_cache[1]
