"""Which modules are found as blocks, and which of them are chosen."""

import pytest
import torch
from torch import nn

from lightning_gacp.blocks import Block, evenly_spaced, every_nth, find_blocks


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class OtherLayer(Layer):
    """Another class of the same shape."""


class Stage(nn.Module):
    """Blocks of one width, as in hierarchical vision models."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Layer(width) for _ in range(depth)])
        self.widen = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.widen(self.blocks(x))


class Experts(nn.Module):
    """A mixture-of-experts block: holds a run too, but a run of what is not called in a row."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)


class GradientCheckpointingLayer(nn.Module):
    """Stands for the class of that name in transformers."""


class HFLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def names(module: nn.Module, blocks: object = None) -> list[str]:
    return [block.name for block in find_blocks(module, blocks)]


def test_litgpt_style_module_dict() -> None:
    gpt = nn.Module()
    gpt.transformer = nn.ModuleDict(
        {"wte": nn.Embedding(8, 4), "h": nn.ModuleList([Layer() for _ in range(3)]), "ln_f": nn.LayerNorm(4)}
    )
    found = find_blocks(gpt)
    assert [block.name for block in found] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert {block.stack for block in found} == {"transformer.h"}
    assert found[1].module is gpt.get_submodule("transformer.h.1")


def test_sequential_of_user_blocks_leaves_out_stem_and_head() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), Layer(), nn.Dropout(), Layer(), nn.Linear(4, 2))) == ["1", "3"]


def test_encoder_and_decoder_of_torch_are_two_stacks() -> None:
    model = nn.Transformer(
        d_model=8, nhead=2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8, batch_first=True
    )
    found = find_blocks(model)
    assert [block.name for block in found] == [
        *(f"encoder.layers.{index}" for index in range(2)),
        *(f"decoder.layers.{index}" for index in range(3)),
    ]
    assert [block.name for block in every_nth(found, 2)] == ["encoder.layers.0", "decoder.layers.0", "decoder.layers.2"]


def test_stages_of_a_hierarchical_model_are_not_blocks() -> None:
    model = nn.Sequential(Stage(4, 1), Stage(8, 3))
    assert names(model) == ["0.blocks.0", "1.blocks.0", "1.blocks.1", "1.blocks.2"]
    flat = nn.Sequential(nn.Sequential(Layer(4), Layer(4)), nn.Sequential(Layer(4), Layer(4)))
    assert names(flat) == ["0.0", "0.1", "1.0", "1.1"]


def test_experts_inside_a_block_are_not_blocks() -> None:
    assert names(nn.ModuleDict({"layers": nn.ModuleList([Experts(), Experts()])})) == ["layers.0", "layers.1"]


def test_small_runs_beside_a_large_one_are_left_out() -> None:
    model = nn.ModuleDict(
        {
            "heads": nn.ModuleList([OtherLayer(2) for _ in range(2)]),
            "layers": nn.ModuleList([Layer(64) for _ in range(4)]),
        }
    )
    assert names(model) == [f"layers.{index}" for index in range(4)]


def test_a_model_of_one_layer() -> None:
    assert names(nn.ModuleDict({"layers": nn.ModuleList([Layer()])})) == ["layers.0"]


def test_a_shared_block_appears_once() -> None:
    shared = Layer()
    assert names(nn.ModuleDict({"layers": nn.ModuleList([shared, Layer(), shared])})) == ["layers.0", "layers.1"]


def test_layers_marked_by_huggingface_win_over_longer_runs() -> None:
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([HFLayer(), HFLayer()]), "others": nn.ModuleList([Layer(16) for _ in range(9)])}
    )
    assert names(model) == ["layers.0", "layers.1"]


def test_no_split_modules_in_a_module_list() -> None:
    model = nn.ModuleDict(
        {"embed": OtherLayer(), "a": nn.ModuleList([OtherLayer()]), "b": nn.ModuleList([Layer(), Layer()])}
    )
    model._no_split_modules = ["OtherLayer"]
    assert names(model) == ["a.0"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (Layer, ["a.0", "a.1", "b.0"]),
        (OtherLayer, ["b.0"]),
        ("OtherLayer", ["b.0"]),
        ("Layer", ["a.0", "a.1", "b.0"]),  # a base class counts
        ("a.*", ["a.0", "a.1"]),  # and not what is inside `a.0`
        ("*", ["a.0", "a.1", "b.0"]),  # neither the model nor its ModuleLists
        (["b.0", "a.1"], ["a.1", "b.0"]),  # in the order of the model
    ],
)
def test_explicit_blocks(blocks: object, expected: list[str]) -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()]), "b": nn.ModuleList([OtherLayer()])})
    assert names(model, blocks) == expected


def test_the_model_itself_can_be_the_block() -> None:
    model = Layer()
    assert find_blocks(model, Layer) == [Block("", model, "")]


@pytest.mark.parametrize("blocks", ["Layre", nn.Conv2d, ["Layer", "decoder.*"], nn.ModuleList, []])
def test_nothing_matched_is_an_error_that_lists_the_candidates(blocks: object) -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()])})
    with pytest.raises(ValueError, match=r"`blocks=.*`a\.\*`: 2 x `Layer`"):
        find_blocks(model, blocks)


def test_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"No repeated blocks were found in `Sequential`\. Candidates: `0`: `Linear`"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.parametrize("blocks", [3, [3], Layer(), [int]])
def test_blocks_of_a_wrong_type(blocks: object) -> None:
    with pytest.raises(TypeError):
        find_blocks(nn.ModuleList([Layer()]), blocks)


def test_every_nth_counts_each_stack_apart() -> None:
    blocks = [Block(f"{stack}{i}", nn.Identity(), stack) for stack in "ab" for i in range(5)]
    assert [block.name for block in every_nth(blocks, 2)] == ["a0", "a2", "a4", "b0", "b2", "b4"]
    assert [block.name for block in every_nth(blocks, 4)] == ["a0", "a4", "b0", "b4"]
    assert every_nth(blocks, 1) == blocks
    assert [block.name for block in every_nth(blocks, 10)] == ["a0", "b0"]


@pytest.mark.parametrize("n", [0, -1])
def test_every_n_below_one_is_an_error(n: int) -> None:
    with pytest.raises(ValueError, match=f"`every_n_layers={n}` must be at least 1"):
        every_nth([], n)


@pytest.mark.parametrize("n", [1.0, True, None, "2"])
def test_every_n_of_a_wrong_type(n: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        every_nth([], n)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [0, 2, 4]), (1 / 3, [0, 3]), (0.01, [0])]
)
def test_evenly_spaced(fraction: float, expected: list[int]) -> None:
    blocks = [Block(str(index), nn.Identity(), "") for index in range(6)]
    assert [int(block.name) for block in evenly_spaced(blocks, fraction)] == expected


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="`fraction="):
        evenly_spaced([], fraction)
