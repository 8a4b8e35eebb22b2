"""One cycle of a Hugging Face model equals one big batch; what their own Trainer makes of the same micro-batches."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CASES = [
    "causal LM, Llama",
    "causal LM, Llama, packed",
    "encoder-decoder, T5",
    "masked LM, BERT",
    "classification, BERT",
]
# Causal language models of Hugging Face compute their loss in float32, whatever the weights are.
TOLERANCE = {"LlamaForCausalLM": 3e-7, "Qwen3MoeForCausalLM": 3e-7, "T5ForConditionalGeneration": 3e-7}


@pytest.fixture
def script(benchmark_script: Any) -> Any:
    return benchmark_script("hugging_face_models")


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", [*CASES, "experts, Qwen3Moe, no balancing"])
def test_a_cycle_is_one_big_batch(script, name, manual):
    """Micro-batches of 3, 1, 4 and 2 samples of different lengths, `num_items="auto"`."""
    case = script.CASES[name]
    row = script.compare(case, rows=(3, 1, 4, 2), manual=manual, theirs=False)
    assert row["ours"] < TOLERANCE.get(case.model, 1e-12), row


def test_balancing_of_experts_looks_across_the_batch(script):
    """No weighting makes the balancing loss of micro-batches that of the batch; it is the only difference."""
    row = script.compare(script.CASES["experts, Qwen3Moe, balancing 0.02"], theirs=False)
    assert 1e-4 < row["ours"] < 2e-2


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Hugging Face's Trainer needs accelerate")
@pytest.mark.parametrize("name", ["classification, BERT", "causal LM, Llama"])
def test_their_trainer_on_the_same_micro_batches(script, name):
    """Right where the model divides by `num_items_in_batch`; a head that ignores it is 4 times too large at 4."""
    row = script.compare(script.CASES[name])
    if name == "causal LM, Llama":
        assert row["theirs"] < 3e-7
    else:
        assert row["their ratio"] == pytest.approx(4.0, rel=1e-9) and row["ratio"] == pytest.approx(1.0, rel=1e-12)
