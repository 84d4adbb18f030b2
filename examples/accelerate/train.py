"""Accelerate on two processes, sparse by one line; ``--resume`` goes on from the last checkpoint.

torchrun --nproc-per-node=2 examples/accelerate/train.py
torchrun --nproc-per-node=2 examples/accelerate/train.py --resume
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import Linear, Module, ReLU, Sequential
from torch.utils.data import DataLoader, TensorDataset

import sparsync


def main(arguments: Sequence[str] | None = None) -> tuple[Module, float]:
    """Return the model, and the loss of the last epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, help="of the whole training; 4, with --resume 8")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dense", action="store_true", help="without sparsync, to compare with")
    options = parser.parse_args(arguments)
    epochs = options.epochs or (8 if options.resume else 4)

    set_seed(0)
    centers, labels = torch.randn(10, 64), torch.arange(2000) % 10
    data = TensorDataset(centers[labels] + 2 * torch.randn(2000, 64), labels)
    model = Sequential(Linear(64, 256), ReLU(), Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    if not options.dense:
        sync = sparsync.hosts.accelerate.attach(accelerator, model, optimizer)  # the line that makes it sparse

    folder, first, mean = Path(options.folder), 0, 0.0
    if options.resume:
        first = max(int(path.name) for path in folder.iterdir()) + 1
        accelerator.load_state(str(folder / str(first - 1)))
    for epoch in range(first, epochs):
        losses = []
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}")
        accelerator.save_state(str(folder / str(epoch)))

    if not options.dense:
        total = sync.stats().total
        dense = 4 * total.steps * sum(parameter.numel() for parameter in model.parameters())  # what a ring of two sends
        accelerator.print(f"{total.steps} steps, a worker sent {total.traffic / max(1, dense):.1%} of dense's bytes")
        accelerator.print(f"{folder} has the checkpoints, in each the residuals of every rank; --resume goes on")
        sync.detach()
    return accelerator.unwrap_model(model), mean


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
