"""Counters: what they find in a batch, and what they say when they do not."""

from __future__ import annotations

import importlib
import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_gacp.accumulation import CausalLMTargets, Samples, Targets, make_counter
from lightning_gacp.accumulation.counters import first_tensor


@dataclass
class Batch:
    inputs: Tensor
    labels: Tensor


LABELS = torch.tensor([[5, 6, -100, 7], [-100, 8, -100, -100]])  # 4 in all; 3 after the shift


def test_causal_lm_leaves_the_first_label_of_each_row_out():
    assert CausalLMTargets()({"labels": LABELS}) == 3


def test_causal_lm_counts_shifted_labels_as_they_are():
    """Packed sequences come shifted, per sequence; `labels` beside them is not counted."""
    shifted = torch.tensor([[6, -100, 7, -100, 9, 1]])
    assert CausalLMTargets()({"labels": LABELS, "shift_labels": shifted}) == 4


def test_targets_counts_all_labels():
    assert Targets()({"labels": LABELS}) == 4


@pytest.mark.parametrize("counter", [Targets, CausalLMTargets])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ignore_index_of_segmentation(counter, dtype):
    mask = torch.zeros(2, 4, 4, dtype=dtype)
    mask[:, :, 0] = 255
    mask[0, 0, 1] = 255
    expected = {Targets: 32 - 9, CausalLMTargets: 24 - 1}[counter]
    assert counter("mask", ignore_index=255)({"mask": mask}) == expected
    assert counter("mask")({"mask": mask}) == {Targets: 32, CausalLMTargets: 24}[counter]  # -100 is not in it


@pytest.mark.parametrize(
    "batch, key",
    [
        ({"y": LABELS}, "y"),
        ((torch.zeros(2, 3), LABELS), 1),
        ([torch.zeros(2, 3), torch.zeros(1), LABELS], -1),
        (Batch(torch.zeros(2, 3), LABELS), "labels"),
        (UserDict(labels=LABELS), "labels"),
        (namedtuple("Pair", "x y")(torch.zeros(2), LABELS), 1),
    ],
    ids=["dict", "tuple", "list", "dataclass", "mapping", "namedtuple"],
)
def test_where_labels_may_stand(batch, key):
    assert Targets(key)(batch) == 4
    assert CausalLMTargets(key)(batch) == 3


@pytest.mark.parametrize("shape", [(0,), (64,), (65,), (2, 32), (3, 99), (2, 5, 50)])
def test_few_labels_and_many(shape):
    """They are counted in two ways."""
    labels = torch.randint(3, shape, generator=torch.Generator().manual_seed(0))
    assert Targets(ignore_index=1)({"labels": labels}) == int((labels != 1).sum())


def test_labels_as_a_list_of_numbers():
    assert Targets()({"labels": [1, -100, 0]}) == 2


@pytest.mark.parametrize(
    "batch, found",
    [
        ({"ids": LABELS, "x": 1}, r"a `dict` with the keys \['ids', 'x'\]"),
        ((LABELS, LABELS), r"a `tuple` of 2: \[Tensor, Tensor\]"),
        (LABELS, "a `Tensor`"),
        ({"labels": None}, r"a `dict` with the keys \['labels'\]"),
        ({"labels": [LABELS, LABELS]}, r"a `dict` with the keys \['labels'\]"),
    ],
)
@pytest.mark.parametrize("counter", [Targets(), CausalLMTargets()])
def test_no_labels_found(counter, batch, found):
    """The error names the counter, the key, what was there, and two ways out."""
    with pytest.raises(ValueError, match=rf"looked for labels under `'labels'` and found none in {found}") as error:
        counter(batch)
    assert type(counter).__name__ in str(error.value)
    assert "lightning_gacp.Targets(key=...)" in str(error.value) and "count_items(self, batch)" in str(error.value)


def test_index_out_of_range_is_the_same_error():
    with pytest.raises(ValueError, match="looked for labels under `2`"):
        Targets(2)((LABELS, LABELS))


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5, 2), torch.zeros(3)),
        {"lr": 0.1, "scalar": torch.tensor(1.0), "x": [{"deep": torch.zeros(5)}]},
        Batch(torch.zeros(5, 1), LABELS),
    ],
    ids=["tensor", "tuple", "nested", "dataclass"],
)
def test_samples_is_the_first_dimension(batch):
    assert Samples()(batch) == 5


def test_samples_of_an_object_with_attributes():
    class Graph:
        def __init__(self):
            self.name, self.x = "g", torch.zeros(5, 1)

    assert Samples()(Graph()) == 5


def test_samples_without_a_tensor():
    with pytest.raises(
        ValueError, match=r"found none in a `dict` with the keys \['text'\].*Write a counter of your own"
    ):
        Samples()({"text": ["a", "b"]})
    assert first_tensor(torch.tensor(1.0)) is None


def test_names():
    assert repr(make_counter("causal_lm")) == "CausalLMTargets(key='labels', ignore_index=-100)"
    assert repr(make_counter("labels")) == "Targets(key='labels', ignore_index=-100)"
    assert repr(make_counter("samples")) == "Samples()"


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "their_package.py").write_text(
        "def count(batch):\n    return len(batch)\n\n"
        "class Count:\n    def __call__(self, batch):\n        return 7\n\n"
        "N = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_dotted_import_path(package):
    """For YAML: a function, or a class that is made with no arguments."""
    assert make_counter("their_package.count")([1, 2]) == 2
    assert make_counter("their_package.Count")([1, 2]) == 7


def test_dotted_path_to_something_else(package):
    with pytest.raises(TypeError, match="`num_items=3` cannot be called: a counter takes a batch"):
        make_counter("their_package.N")


@pytest.mark.parametrize("name", ["tokens", "", "their.missing.count", "torch.no_such_thing", "Causal_LM"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="is not a known counter: write one of 'auto', 'causal_lm', 'labels', 'samp"):
        make_counter(name)


def test_not_callable():
    with pytest.raises(TypeError, match="`num_items=8` cannot be called"):
        make_counter(8)  # type: ignore[arg-type]


def test_a_callable_is_taken_as_it_is():
    def count(batch):
        return 1

    assert make_counter(count) is count


@pytest.mark.parametrize("counter", [Targets(1, 255), CausalLMTargets(), Samples()])
def test_counters_pickle(counter):
    """Strategies are pickled by spawned processes."""
    assert repr(pickle.loads(pickle.dumps(counter))) == repr(counter)


@pytest.mark.parametrize("value", ["-100", 255.0, None, True])
@pytest.mark.parametrize("counter", [CausalLMTargets, Targets])
def test_ignore_index_that_no_label_equals(counter, value):
    with pytest.raises(TypeError, match=f"`ignore_index={value!r}` is no integer, as labels are"):
        counter(ignore_index=value)
