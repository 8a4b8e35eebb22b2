"""DDP and FSDP2 on two CPU processes: the same weights as without checkpointing, and no collective more than needed."""

import copy
import warnings

import torch
import torch.distributed as dist
from strategies.on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from checkpointing.models import LM, AttentionBlock, MLPBlock, train
from lightning_gacp.checkpointing import checkpoint_blocks


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 11, (2, 4), generator=generator) for _ in range(3)]


class Sharing(LM):
    """Calls its first block twice, and has a block that it never calls."""

    def __init__(self) -> None:
        super().__init__(lambda width: AttentionBlock(width, dropout=0.2), 3)
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 0):
            x = self.layers[index](x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Normalised(MLPBlock):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.batch_norm(x.flatten(0, 1)).view_as(x))


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(full(found[name]), full(value))]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ddp(rank: int, make, settings: dict) -> list[str]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = make()
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed)
    wrapped = DistributedDataParallel(checkpointed, **settings)
    reference = DistributedDataParallel(plain, **settings)
    return differences(train(wrapped, batches(rank)), train(reference, batches(rank)))


def test_ddp_with_find_unused_parameters_marks_a_parameter_ready_twice() -> None:
    assert on_ranks(ddp, Sharing, {"find_unused_parameters": True}) == [[], []]


def test_ddp_with_static_graph_and_a_shared_block() -> None:
    assert on_ranks(ddp, Sharing, {"static_graph": True}) == [[], []]


def test_ddp_broadcasts_the_buffers_of_batch_norm() -> None:
    """The recomputation must not touch the buffers that DDP sends around."""
    assert on_ranks(ddp, lambda: LM(Normalised, 3), {}) == [[], []]


def make_sharded(order: str, precision: torch.dtype | None) -> nn.Module:
    torch.manual_seed(0)
    model = LM(lambda width: AttentionBlock(width, dropout=0.2), 3)
    if order == "before":
        checkpoint_blocks(model, every_n_layers=2)
    policy = MixedPrecisionPolicy(param_dtype=precision)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if order == "after":
        checkpoint_blocks(model, every_n_layers=2)
    return model


def fsdp2(rank: int, order: str, precision: torch.dtype | None) -> list[str]:
    dist.init_process_group("gloo")
    trained = train(make_sharded(order, precision), batches(rank))
    return differences(trained, train(make_sharded("never", precision), batches(rank)))


def test_fsdp2_wrapped_before_and_after() -> None:
    for order in ("before", "after"):
        assert on_ranks(fsdp2, order, None) == [[], []]
    assert on_ranks(fsdp2, "after", torch.bfloat16) == [[], []]


def fsdp2_shared(rank: int) -> list[str]:
    """A frozen embedding, so that no input needs a gradient, and a first block that is called twice."""
    dist.init_process_group("gloo")
    results = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model = Sharing()
        del model.unused
        model.embed.requires_grad_(False)
        for part in (*model.layers, model):
            fully_shard(part)
        if checkpointed:
            checkpoint_blocks(model)
        results.append(train(model, batches(rank)))
    return differences(*results)


def test_fsdp2_with_a_block_called_twice_and_nothing_but_adapters_to_train() -> None:
    assert on_ranks(fsdp2_shared) == [[], []]


def collectives(rank: int, order: str) -> dict[str, int]:
    """Collectives of one step by their kind."""
    dist.init_process_group("gloo")
    model = make_sharded(order, None)
    train(model, batches(rank)[:1])  # the first step sets things up
    with CommDebugMode() as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode puts backward hooks on modules whose inputs need no gradient
        model(batches(rank)[1]).backward()
    return {str(kind): count for kind, count in counter.get_comm_counts().items()}


def test_recomputation_gathers_the_weights_once_more() -> None:
    """Hooks are outside of the checkpoint, so the weights gathered for the backward serve the recomputation."""
    (plain, _), *checkpointed = (on_ranks(collectives, order) for order in ("never", "before", "after"))
    assert sum(plain.values()) > 0
    assert checkpointed == [[plain, plain], [plain, plain]]


def fsdp2_remove(rank: int) -> bool:
    dist.init_process_group("gloo")
    model = LM(MLPBlock, 2)
    first = checkpoint_blocks(model, blocks="layers.0")
    for layer in model.layers:
        fully_shard(layer)
    second = checkpoint_blocks(model, blocks="layers.1")
    sharded = [isinstance(layer, FSDPModule) and isinstance(layer, MLPBlock) for layer in model.layers]
    assert [type(layer).__name__ for layer in model.layers] == ["FSDPMLPBlock", "FSDPMLPBlock"]
    made = type(model.layers[1])(8)  # FSDP2's constructor gives an object of the original class
    assert type(made) in (MLPBlock, type(model.layers[1]).__mro__[type(model.layers[1])._orig_cls_mro_index])
    first.remove()
    second.remove()
    model(batches(rank)[0]).backward()
    return all(sharded) and all(isinstance(layer, FSDPModule) for layer in model.layers)


def test_removal_leaves_fsdp2_in_place() -> None:
    assert on_ranks(fsdp2_remove) == [True, True]
