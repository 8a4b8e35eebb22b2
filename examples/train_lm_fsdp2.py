"""The language model with parameters, gradients and optimizer states spread over devices (FSDP2).

    python examples/train_lm_fsdp2.py fit -c examples/configs/base.yaml -c examples/configs/fsdp2.yaml

Only `configure_model` is added to the model of ``train_lm.py``; Lightning calls it once the device mesh is there.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from torch.distributed.fsdp import fully_shard
from train_lm import LanguageModel, Paragraphs


class ShardedLanguageModel(LanguageModel):
    """The language model, sharded over the ranks of the data-parallel mesh."""

    def configure_model(self) -> None:
        """Shard each block, then what is left."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line."""
    return LightningCLI(ShardedLanguageModel, Paragraphs, save_config_callback=None, args=args)


if __name__ == "__main__":
    main()
