"""`num_items="auto"`: tokens only where that is known, and never a wrong weight in silence."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gacp.accumulation.auto import EqualWeights, choose_counter

FLOAT = torch.zeros(4, 6)
IDS = torch.zeros(4, 6, dtype=torch.int64)
CLASSES = torch.tensor([1, 2, -100, 3])
Triple = namedtuple("Triple", "labels x z")


@dataclass
class Batch:
    x: Any
    labels: Any


def chosen(batch, module: nn.Module | None = None) -> str:
    counter = choose_counter(module or nn.Linear(1, 1), batch)
    return "equal, with advice" if isinstance(counter, EqualWeights) and counter.advice else repr(counter)


def test_the_modules_own_count_comes_first():
    class Own(nn.Module):
        def count_items(self, batch):
            return 17

    counter = choose_counter(Own(), {"shift_labels": IDS, "labels": IDS})
    assert counter(None) == 17 and repr(counter) == "the module's own `count_items(batch)`"


def test_shifted_labels_are_counted_as_they_are():
    assert chosen({"labels": IDS, "shift_labels": IDS}) == "Targets(key='shift_labels', ignore_index=-100)"
    assert chosen({"labels": IDS, "shift_labels": None}) == "equal, with advice"


ONE_TARGET_A_SAMPLE = {
    "tuple": ((FLOAT, CLASSES), "Targets(key=1, ignore_index=-100)"),
    "column": ((FLOAT, CLASSES[:, None]), "Targets(key=1, ignore_index=-100)"),
    "labels": ({"x": FLOAT, "labels": CLASSES}, "Targets(key='labels', ignore_index=-100)"),
    "label": ({"x": FLOAT, "label": CLASSES}, "Targets(key='label', ignore_index=-100)"),
    "y": ({"x": FLOAT, "y": CLASSES}, "Targets(key='y', ignore_index=-100)"),
    "dataclass": (Batch(FLOAT, CLASSES), "Targets(key='labels', ignore_index=-100)"),
    "namedtuple": (Triple(CLASSES, FLOAT, IDS), "Targets(key=0, ignore_index=-100)"),
    "nested": ((FLOAT, {"class": CLASSES}), "Samples()"),
}


@pytest.mark.parametrize("batch, expected", ONE_TARGET_A_SAMPLE.values(), ids=ONE_TARGET_A_SAMPLE)
def test_one_integer_target_a_sample(batch, expected):
    """Those that the loss ignores do not count: cross entropy is a mean over 3 of these 4."""
    assert chosen(batch) == expected
    assert choose_counter(nn.Linear(1, 1), batch)(batch) == (4 if expected == "Samples()" else 3)


@pytest.mark.parametrize(
    "batch",
    [
        FLOAT,
        (FLOAT,),
        (FLOAT, FLOAT),
        (FLOAT, ["a", "b", "c", "d"]),
        {"x": FLOAT},
        {"x": FLOAT, "labels": FLOAT},
        {"x": FLOAT, "labels": None},
        {"x": FLOAT, "labels": ["a", "b", "c", "d"]},
        Batch(FLOAT, FLOAT),
        (FLOAT, {"heat": FLOAT}),
    ],
)
def test_no_integer_labels_are_samples(batch):
    """No labels, regression, multi-label: the loss is a mean over samples, whatever else it averages over."""
    assert chosen(batch) == "Samples()"
    assert choose_counter(nn.Linear(1, 1), batch)(batch) == 4


AMBIGUOUS = {
    "tokens in a tuple": (FLOAT, IDS),
    "tokens in a dict": {"x": FLOAT, "labels": IDS},
    "segmentation": {"image": FLOAT, "target": torch.zeros(4, 8, 8, dtype=torch.uint8)},
    "multi-label": (FLOAT, IDS.bool()),
    "a bare tensor of tokens": IDS,
    "tokens alone in a tuple": (IDS,),
    "detection": {"pixel_values": FLOAT, "labels": [{"boxes": FLOAT}, {"boxes": FLOAT}]},
    "detection in a tuple": ([FLOAT[0], FLOAT[1]], ({"boxes": FLOAT}, {"boxes": FLOAT})),
    "ragged lists": {"x": FLOAT, "labels": [[1, 2], [3]]},
    "a list of tensors": {"x": FLOAT, "labels": [CLASSES, CLASSES]},
    "dataclass": Batch(FLOAT, IDS),
    "named field": Triple(IDS, FLOAT, CLASSES),
    "nested": (FLOAT, {"mask": IDS}),
    "samples not collated": [(FLOAT, 1), (FLOAT, 2)],
}


@pytest.mark.parametrize("batch", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_cannot_be_known_weighs_the_same(batch):
    counter = choose_counter(nn.Linear(1, 1), batch)
    assert isinstance(counter, EqualWeights)
    assert counter(batch) == counter({}) == 1
    for advice in ("`num_items='labels'`", "`'causal_lm'`", "`num_items='samples'`", "`num_items=None`"):
        assert advice in counter.advice


def test_advice_says_what_was_found():
    counter = choose_counter(nn.Linear(1, 1), {"x": FLOAT, "labels": IDS})
    assert isinstance(counter, EqualWeights)
    assert "found targets of shape (4, 6) in a `dict` with the keys ['labels', 'x']" in counter.advice


def test_no_tensor_at_all():
    assert chosen({"text": ["a", "b"]}) == "equal, with advice"


# ---------------------------------------------------------------- Hugging Face heads

transformers = pytest.importorskip("transformers")
SMALL = {
    "bart": dict(
        vocab_size=9,
        d_model=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        decoder_start_token_id=2,
    ),
    "bert": dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4),
    "gpt2": dict(vocab_size=9, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0),
    "llama": dict(vocab_size=9, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1),
    "t5": dict(vocab_size=9, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1, decoder_start_token_id=0),
    "xlnet": dict(vocab_size=9, d_model=4, n_layer=1, n_head=1, d_inner=4),
}
CAUSAL, FULL = "CausalLMTargets(key='labels', ignore_index=-100)", "Targets(key='labels', ignore_index=-100)"


def holder(name: str, family: str) -> nn.Module:
    module = nn.Module()
    config = transformers.AutoConfig.for_model(family, **SMALL[family])
    module.model = getattr(transformers, name)(config)
    return module


@pytest.mark.parametrize(
    "name, family, labels, expected",
    [
        ("LlamaForCausalLM", "llama", IDS, CAUSAL),
        ("GPT2LMHeadModel", "gpt2", IDS, CAUSAL),
        ("T5ForConditionalGeneration", "t5", IDS, FULL),
        ("BartForConditionalGeneration", "bart", IDS, FULL),
        ("BertForMaskedLM", "bert", IDS, FULL),
        ("BertForTokenClassification", "bert", IDS, FULL),
        ("BertForSequenceClassification", "bert", CLASSES, FULL),
        ("BertForSequenceClassification", "bert", FLOAT, "Samples()"),
        # No head with a loss of tokens: `labels` is what the user's own loss takes.
        ("BertModel", "bert", CLASSES, FULL),
        ("BertForMultipleChoice", "bert", CLASSES, FULL),
        ("T5EncoderModel", "t5", CLASSES, FULL),
        ("BertModel", "bert", IDS, "equal, with advice"),
        ("BertForPreTraining", "bert", IDS, "equal, with advice"),
        ("GPT2DoubleHeadsModel", "gpt2", IDS, "equal, with advice"),
        ("XLNetLMHeadModel", "xlnet", IDS, "equal, with advice"),
        # A decoder taken out of an encoder-decoder model: called a causal language model, and its loss does not shift.
        ("BartForCausalLM", "bart", IDS, "equal, with advice"),
        # Several codebooks: what is last in the labels' shape is no sequence, and the loss is no mean over all.
        ("LlamaForCausalLM", "llama", IDS[None], "equal, with advice"),
        ("BertForTokenClassification", "bert", IDS[None], "equal, with advice"),
    ],
)
def test_hugging_face_heads(name, family, labels, expected):
    assert chosen({"input_ids": IDS, "labels": labels}, holder(name, family)) == expected


@pytest.mark.parametrize(
    "name, family",
    [
        ("LlamaForCausalLM", "llama"),
        ("GPT2LMHeadModel", "gpt2"),
        ("BartForCausalLM", "bart"),
        ("BartForConditionalGeneration", "bart"),
        ("T5ForConditionalGeneration", "t5"),
        ("BertForMaskedLM", "bert"),
        ("BertForTokenClassification", "bert"),
        ("XLNetLMHeadModel", "xlnet"),
    ],
)
def test_tokens_that_are_counted_are_those_that_the_loss_teaches(name, family):
    """A head that shifts, or does not, against its name: the logits that get a gradient are counted, or nothing is."""
    module = holder(name, family)
    labels = torch.tensor([[1, 0, 1, -100, 1, -100], [1, -100, -100, 1, 0, 0]])
    counter = choose_counter(module, {"input_ids": IDS[:2], "labels": labels})
    output = module.model(input_ids=IDS[:2], labels=labels)
    (gradient,) = torch.autograd.grad(output.loss, output.logits)
    taught = int(gradient.abs().sum(-1).count_nonzero())
    assert taught in (6, 8)
    assert isinstance(counter, EqualWeights) or counter({"labels": labels}) == taught


def test_labels_that_the_step_makes_are_not_guessed():
    assert chosen({"input_ids": IDS}, holder("LlamaForCausalLM", "llama")) == "equal, with advice"
    assert chosen({"input_ids": IDS}, holder("BertModel", "bert")) == "Samples()"


def test_two_models_leave_open_whose_loss_it_is():
    """A teacher beside a student."""
    pair = nn.ModuleList([holder("LlamaForCausalLM", "llama"), holder("LlamaForCausalLM", "llama")])
    assert chosen({"input_ids": IDS, "labels": IDS}, pair) == "equal, with advice"


def test_a_loss_that_was_replaced_is_not_guessed():
    module = holder("LlamaForCausalLM", "llama")

    def my_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return logits.mean()

    module.model.loss_function = my_loss
    assert chosen({"input_ids": IDS, "labels": IDS}, module) == "equal, with advice"


def test_deep_inside_other_modules():
    """As an adapter library wraps it."""
    assert chosen({"labels": IDS}, nn.Sequential(nn.ModuleList([holder("LlamaForCausalLM", "llama")]))) == CAUSAL
