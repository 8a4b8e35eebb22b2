"""Under FSDP2 a block's weights are others in its forward than outside, and come from one large buffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch import multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from lightning_gacp.offload import offload_blocks
from lightning_gacp.offload.transfers import Transfers

from .models import batch, build
from .simulated import SimulatedDevice


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shapes: list[tuple[int, ...]] = []
    start_out = Transfers.start_out

    def watching(self: Transfers, tensor: torch.Tensor, stream: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return start_out(self, tensor, stream)

    Transfers.start_out = watching  # type: ignore[method-assign]
    results = []
    for when in ("never", "before fully_shard", "after fully_shard"):
        model, device = build("transformer"), SimulatedDevice()  # as a device only: operations are not watched
        if when == "before fully_shard":
            offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
        for block in model.blocks:
            fully_shard(block.down)  # a unit inside the block: its weights are whole only in its own forward
            fully_shard(block)
        fully_shard(model)
        if when == "after fully_shard":
            offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
        for step in range(2):
            model(batch(step + 10 * rank)).square().sum().backward()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    if rank == 0:
        weights = {shape for p in build("transformer").parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        found = {
            "same": [all(map(torch.equal, results[0], other)) for other in results[1:]],
            "moved": len(shapes),
            "weights": len(weights & set(shapes)),
        }
        Path(folder, "result.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def test_gradients_are_equal_and_no_weight_is_moved(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["same"] == [True, True] and found["moved"] > 0 and found["weights"] == 0
