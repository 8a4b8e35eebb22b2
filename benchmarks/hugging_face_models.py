"""Gradient of one cycle against one big batch, on Hugging Face models built from their configurations.

    python benchmarks/hugging_face_models.py

Four micro-batches with different numbers of targets make a cycle. One big batch: all of them padded to one length, in
one forward and one backward, without a Trainer. Weights are float64; language models of Hugging Face compute their loss
in float32, hence errors of 1e-7. The error is ``|g - g_big| / |g_big|`` over all parameters, the ratio
``|g| / |g_big|``. Hugging Face's own Trainer gets the same micro-batches with ``gradient_accumulation_steps=4``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_gacp as gacp

VOCABULARY = 37
LENGTHS = (9, 4, 2, 7)  # tokens of the longest row of each micro-batch
Batch = dict[str, Tensor]


@dataclass
class Case:
    """A model, what its batches hold, and what the strategy is told.

    Attributes:
        model: Class in ``transformers``.
        family: Name of its configuration.
        labels: ``"tokens"``: one a token, with padding left out; ``"masked"``: on some tokens; ``"class"``: one a
            sample; ``"packed"``: several sequences in a row, with ``shift_labels``.
        sizes: For the configuration.
    """

    model: str
    family: str
    labels: str
    sizes: dict[str, Any] = field(default_factory=dict)


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_MOE = {**_DECODER, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}

CASES = {
    "causal LM, Llama": Case("LlamaForCausalLM", "llama", "tokens", _DECODER),
    "causal LM, Llama, packed": Case("LlamaForCausalLM", "llama", "packed", _DECODER),
    "encoder-decoder, T5": Case("T5ForConditionalGeneration", "t5", "tokens", _T5),
    "masked LM, BERT": Case("BertForMaskedLM", "bert", "masked", _BERT),
    "classification, BERT": Case("BertForSequenceClassification", "bert", "class", {**_BERT, "num_labels": 5}),
    "experts, Qwen3Moe, no balancing": Case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "tokens",
        {**_MOE, "output_router_logits": True, "router_aux_loss_coef": 0.0},
    ),
    "experts, Qwen3Moe, balancing 0.02": Case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "tokens",
        {**_MOE, "output_router_logits": True, "router_aux_loss_coef": 0.02},
    ),
}


def make_model(case: Case) -> Any:
    """The model in float64, with the same weights at every call; in training mode, without dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.family, **case.sizes)
    config._attn_implementation = config._experts_implementation = "eager"  # the one that knows float64
    config.use_cache = False  # with a cache, packed sequences attend to one another
    return getattr(transformers, case.model)(config).double().train()


def micro_batches(case: Case, rows: tuple[int, ...] = (3, 3, 3, 3)) -> list[Batch]:
    """Micro-batches of ``rows`` samples; rows end at random lengths, and labels with them."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number, width in zip(rows, LENGTHS, strict=True):
        ids = torch.randint(3, VOCABULARY, (number, width), generator=generator)
        lengths = torch.randint(2, width + 1, (number, 1), generator=generator)
        lengths[0] = width
        mask = (torch.arange(width) < lengths).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        tokens = torch.where(mask.bool(), ids, -100)
        if case.labels == "class":
            batch["labels"] = torch.randint(5, (number,), generator=generator)
        elif case.labels == "masked":
            chosen = torch.rand(ids.shape, generator=generator) < 0.4
            chosen[0, 0] = True
            batch["labels"] = torch.where(chosen, tokens, -100)
        elif case.labels == "packed":
            batch = _packed(ids, lengths)
        else:
            batch["labels"] = tokens
        batches.append(batch)
    return batches


def _packed(ids: Tensor, lengths: Tensor) -> Batch:
    """All sequences in one row; each starts at position 0, and no target crosses into the next."""
    rows = [row[:length] for row, length in zip(ids, lengths.flatten().tolist(), strict=True)]
    shifted = [torch.cat([row[1:], torch.tensor([-100])]) for row in rows]
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "labels": torch.cat(rows)[None],
        "shift_labels": torch.cat(shifted)[None],
    }


def joined(case: Case, batches: list[Batch]) -> Batch:
    """The cycle as one batch."""
    if case.labels == "packed":
        return {key: torch.cat([batch[key] for batch in batches], 1) for key in batches[0]}
    width = max(batch["input_ids"].shape[1] for batch in batches)

    def padded(key: str, value: Tensor) -> Tensor:
        if value.ndim == 1:
            return value
        fill = -100 if key == "labels" else 0
        return torch.nn.functional.pad(value, (0, width - value.shape[1]), value=fill)

    return {key: torch.cat([padded(key, batch[key]) for batch in batches]) for key in batches[0]}


def flat(model: torch.nn.Module) -> Tensor:
    """All gradients as one vector."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([grad.detach().flatten() for grad in grads])


def big_batch(case: Case, batches: list[Batch]) -> Tensor:
    """The gradient of the cycle as one batch."""
    model = make_model(case)
    model(**joined(case, batches)).loss.backward()
    return flat(model)


class Holder(L.LightningModule):
    """What a user writes around such a model."""

    def __init__(self, model: torch.nn.Module, manual: bool = False) -> None:
        super().__init__()
        self.model = model
        self.automatic_optimization = not manual
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The model's own loss."""
        loss: Tensor = self.model(**batch).loss
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradient that the optimizer is about to use."""
        self.gradients.append(flat(self.model))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def ours(case: Case, batches: list[Batch], manual: bool = False) -> tuple[Tensor, str]:
    """The gradient of one cycle, and what was counted."""
    module = Holder(make_model(case), manual)
    strategy = gacp.GACPStrategy(accumulate_grad_batches=len(batches))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=strategy,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert len(module.gradients) == 1
    return module.gradients[0], strategy.counting


def hugging_face(case: Case, batches: list[Batch]) -> Tensor:
    """The gradient that Hugging Face's Trainer steps with."""
    seen: list[Tensor] = []
    model = make_model(case)

    class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            seen.append(flat(model))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(batches),
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=batches,
            data_collator=lambda samples: samples[0],
            callbacks=[Recorder()],
        ).train()
    assert len(seen) == 1
    return seen[0]


def compare(
    case: Case, rows: tuple[int, ...] = (3, 3, 3, 3), manual: bool = False, theirs: bool = True
) -> dict[str, Any]:
    """Errors and ratios of one case.

    Args:
        case: The model.
        rows: Samples in each micro-batch.
        manual: Ours in manual optimization.
        theirs: Run Hugging Face's Trainer too.
    """
    batches = micro_batches(case, rows)
    expected = big_batch(case, batches)
    found, counting = ours(case, batches, manual)
    row: dict[str, Any] = {"counting": counting, "ours": _error(found, expected), "ratio": _ratio(found, expected)}
    if theirs:
        other = hugging_face(case, batches)
        row |= {"theirs": _error(other, expected), "their ratio": _ratio(other, expected)}
    return row


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _ratio(found: Tensor, expected: Tensor) -> float:
    return float(found.norm() / expected.norm())


def main() -> None:
    """Print the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print("gradient of a cycle of 4 micro-batches against one big batch, float64")
    print(f"{'model':<36}{'ours: error':<14}{'ratio':<9}{'Trainer of HF: error':<22}{'ratio':<9}counted")
    for name, case in CASES.items():
        row = compare(case)
        print(
            f"{name:<36}{row['ours']:<14.1e}{row['ratio']:<9.4f}{row['theirs']:<22.1e}{row['their ratio']:<9.4f}"
            f"{row['counting']}"
        )


if __name__ == "__main__":
    main()
