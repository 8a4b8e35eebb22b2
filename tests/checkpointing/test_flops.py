"""What recomputation costs, in floating-point operations, counted by torch."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from checkpointing.models import LM, AttentionBlock, MLPBlock
from lightning_gacp.checkpointing import checkpoint_blocks

TOKENS = torch.arange(12).view(3, 4) % 11
DEPTH, WIDTH = 4, 8
TOKEN_COUNT = TOKENS.numel()
UP = DOWN = 2 * TOKEN_COUNT * WIDTH * 4 * WIDTH  # multiply-adds of one product of the MLP, times two


def step_flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(TOKENS).backward()
    return counter.get_total_flops()


def extra(model: nn.Module, **settings: object) -> int:
    plain = step_flops(model)
    with checkpoint_blocks(model, **settings):
        return step_flops(model) - plain


@pytest.mark.parametrize(("every_n_layers", "blocks"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_full_adds_one_forward_of_the_blocks_less_what_early_stop_saves(every_n_layers: int, blocks: int) -> None:
    """`down` is the last operation and only its input is saved, so recomputation stops before it."""
    assert extra(LM(MLPBlock, DEPTH, WIDTH), every_n_layers=every_n_layers) == blocks * UP


def test_hooks_inside_a_block_cost_what_early_stop_would_save() -> None:
    model = LM(MLPBlock, DEPTH, WIDTH)
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda *_: None)
    assert extra(model) == DEPTH * (UP + DOWN)


@pytest.mark.parametrize("block", [MLPBlock, AttentionBlock])
@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_save_matmuls_computes_no_product_again(block: type[nn.Module], every_n_layers: int) -> None:
    model = LM(block, DEPTH, WIDTH)
    assert extra(model, every_n_layers=every_n_layers) > 0
    assert extra(model, every_n_layers=every_n_layers, policy="save_matmuls") == 0


def test_save_matmuls_of_convolutions() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(DEPTH)]
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    assert extra(Images()) > 0
    assert extra(Images(), policy="save_matmuls") == 0


def test_a_function_decides_for_each_operation() -> None:
    """It keeps the outputs of `up` and not those of `down`, which early stop leaves out."""
    asked: set[str] = set()

    def policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> bool:
        asked.add(str(operation))
        return operation is torch.ops.aten.addmm.default

    assert extra(LM(MLPBlock, DEPTH, WIDTH), policy=policy) == 0
    assert {"aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default"} <= asked


def test_nothing_is_added_in_eval() -> None:
    model = LM(MLPBlock, DEPTH, WIDTH).eval()
    assert extra(model) == 0
