"""How many bytes wait for the backward pass, against what the shapes say."""

import pytest
import torch

from checkpointing.models import LM, AttentionBlock, MLPBlock, SavedBytes, saved_bytes
from lightning_gacp.checkpointing import checkpoint_blocks

BATCH, LENGTH, WIDTH, VOCABULARY, DEPTH = 3, 5, 8, 11, 8
TOKENS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY


def predicted(checkpointed: int) -> int:
    """Bytes saved by the `LM` of `MLPBlock`s in float32, by hand."""
    float32, int64 = 4, 8
    block_input = WIDTH
    inside = 2 + WIDTH + 4 * WIDTH + 4 * WIDTH  # mean and rstd of the norm; inputs of `up`, of gelu and of `down`
    per_token = DEPTH * block_input + (DEPTH - checkpointed) * inside
    per_token += WIDTH + 2 + WIDTH  # the last norm: input, mean and rstd; input of the head
    per_token += VOCABULARY  # log-softmax
    tokens = BATCH * LENGTH
    total_weight = float32  # a scalar of the loss
    return tokens * (float32 * per_token + int64) + total_weight  # the tokens: for the embedding and the loss


@pytest.mark.parametrize(("every_n_layers", "checkpointed"), [(None, 0), (1, 8), (2, 4), (3, 3), (4, 2), (8, 1)])
def test_saved_bytes_are_what_the_shapes_predict(every_n_layers: int | None, checkpointed: int) -> None:
    model = LM(MLPBlock, DEPTH, WIDTH, VOCABULARY)
    if every_n_layers is not None:
        assert len(checkpoint_blocks(model, every_n_layers).names) == checkpointed
    assert saved_bytes(model, TOKENS) == predicted(checkpointed)


def test_only_the_inputs_of_the_blocks_are_saved() -> None:
    """Under `full` the blocks save their inputs and nothing else; tensors given by keyword are among them, once."""
    model = LM(AttentionBlock, 3, WIDTH)
    checkpoint_blocks(model)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    mask = torch.zeros(LENGTH, LENGTH)
    with SavedBytes(model) as saved:
        inputs = []
        y = x
        for layer in model.layers:
            inputs.append(y)
            y = layer(y, mask=mask)
    assert set(saved.storages) == {tensor.untyped_storage().data_ptr() for tensor in [*inputs, mask]}


def test_nothing_is_recomputed_in_eval_or_without_gradients() -> None:
    model = LM(MLPBlock, DEPTH, WIDTH, VOCABULARY)
    plain = predicted(0)
    checkpoint_blocks(model)
    model.eval()
    assert saved_bytes(model, TOKENS) == plain
    model.train()
    with torch.no_grad():
        assert saved_bytes(model, TOKENS) == 0
    assert saved_bytes(model, TOKENS) == predicted(DEPTH)


def test_bytes_come_back_after_remove() -> None:
    model = LM(MLPBlock, DEPTH, WIDTH, VOCABULARY)
    with checkpoint_blocks(model):
        assert saved_bytes(model, TOKENS) == predicted(DEPTH)
    assert saved_bytes(model, TOKENS) == predicted(0)
