"""Accumulation and checkpointing in a plain PyTorch loop, without Lightning's Trainer.

    python examples/plain_loop.py

`checkpoint_blocks` changes the model, `AccumulationCycle` says how each micro-batch is weighted, and the counter counts
on the batch while it is on the host. One optimizer step over four ragged micro-batches is the step over all of them.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from train_lm import LanguageModel, Paragraphs, collate

import lightning_gacp as gacp


def train(steps: int = 20, cycle_length: int = 4, every_n_layers: int = 2, width: int = 64) -> list[float]:
    """Train the example's model and return the mean loss per token of every optimizer step.

    Args:
        steps: Optimizer steps.
        cycle_length: Micro-batches in each.
        every_n_layers: As in `checkpoint_blocks`.
        width: Size of the model's hidden state.
    """
    torch.manual_seed(1)
    module = LanguageModel(width=width)
    data = Paragraphs()
    data.setup("fit")
    loader = iter(DataLoader(data.train, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    count = gacp.Targets("labels")
    cycle = gacp.AccumulationCycle()
    losses = []
    with gacp.checkpoint_blocks(module.model, every_n_layers=every_n_layers):
        for _ in range(steps):
            meter = gacp.CycleLoss()
            for place in range(cycle_length):
                batch = next(loader)
                items = float(count(batch))
                micro_batch = cycle.add(num_items=items, last=place + 1 == cycle_length)
                gradients = [p.grad for p in module.parameters() if p.grad is not None]
                if micro_batch.factor != 1.0 and gradients:
                    torch._foreach_mul_(gradients, micro_batch.factor)
                loss = module.loss(module.model(batch["ids"]), batch["labels"])
                (loss * micro_batch.weight).backward()
                meter.update(loss, items)
            optimizer.step()
            optimizer.zero_grad()
            cycle.reset()
            losses.append(meter.compute().item())
    return losses


if __name__ == "__main__":
    for step, value in enumerate(train()):
        print(f"step {step:3d}: {value:.3f} nats a byte")
