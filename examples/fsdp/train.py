"""A small transformer, sharded within machines (FSDP2) and exchanged sparsely between them.

    torchrun --nproc-per-node 4 examples/fsdp/train.py

Four processes stand for two machines of two GPUs. Without a GPU it runs on CPUs.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsync

TOKENS, WIDTH, LENGTH, STEPS = 64, 64, 32, 120


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(LENGTH, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        out: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return out


def text(rank: int, step: int, device: str) -> Tensor:
    """Return sequences in which a token mostly follows from the one before."""
    rng = torch.Generator().manual_seed(1000 * rank + step)
    rows = [torch.randint(TOKENS, (16,), generator=rng)]
    for _ in range(LENGTH):
        noise = torch.randint(TOKENS, (16,), generator=rng)
        rows.append(torch.where(torch.rand(16, generator=rng) < 0.1, noise, (5 * rows[-1] + 7) % TOKENS))
    return torch.stack(rows, 1).to(device)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device, rank, size = "cuda" if cuda else "cpu", dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)

    mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = Transformer().to(device)
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])  # and not over both meshes: that would be dense
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sync = sparsync.attach(model, replicate=mesh["replicate"], optimizer=optimizer, total_steps=STEPS)

    for step in range(STEPS):
        rows = text(rank, step, device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            total = sync.stats().total
            print(f"step {step + 1:3}  loss {loss.item():.3f}  sent per step {total.traffic / total.steps:,.0f} bytes")
    if rank == 0:
        dense = 4 * sum(p.to_local().numel() for p in model.parameters())  # a ring all-reduce of two replicas
        total = sync.stats().total
        print(f"loss {loss.item():.3f}; HSDP would send {dense / (total.traffic / total.steps):.0f} times as much")

    sync.detach()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
