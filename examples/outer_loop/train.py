"""A small language model trained by local steps: workers exchange every 20 steps, while they compute the next ones.

    torchrun --standalone --nproc-per-node 2 examples/outer_loop/train.py

Every worker steps weights of its own by AdamW. Every 20 steps it sends the largest entries of how far it went, in four
fragments, each of which travels while 2 further steps are made. --resume goes on from runs/outer_loop, with any number
of workers: give more --steps then.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sparsync

WORDS, LENGTH = 64, 32


class Model(nn.Module):
    """A transformer of one layer that predicts the next word."""

    def __init__(self, width=64):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.scores = nn.Linear(width, WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, words):
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.scores(self.layer(x, src_mask=self.mask, is_causal=True))


def batch(step, rank):
    """Return sentences of a made-up language, in which a word mostly follows from the one before it."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(WORDS, (16, LENGTH + 1), generator=random)
    for place in range(LENGTH):
        follows = (5 * words[:, place] + 7) % WORDS
        words[:, place + 1] = torch.where(torch.rand(16, generator=random) < 0.9, follows, words[:, place + 1])
    return words[:, :-1], words[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/outer_loop"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="local steps of a round")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()  # the plain model: no DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = sparsync.OuterLoop(
        model, optimizer=optimizer, every=given.every, fragments=4, overlap=2, total_steps=given.steps
    )
    if rank == 0:
        print(outer.describe(), flush=True)
    if given.resume:
        files = sorted(given.folder.glob("rank-*.pt"))
        if not files:
            raise SystemExit(f"there is no checkpoint in {given.folder}: leave out --resume")
        states = [torch.load(path, weights_only=True) for path in files]
        outer.load_state_dict([state["outer"] for state in states])
        optimizer.load_state_dict(states[rank % len(states)]["optimizer"])
        dist.barrier()  # all have read before anybody writes

    first = outer.steps
    for step in range(first, given.steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        outer.step()

    given.folder.mkdir(parents=True, exist_ok=True)
    state = {"outer": outer.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, given.folder / f"rank-{rank:05d}.pt")  # every worker has its own
    if rank == 0:
        for old in given.folder.glob("rank-*.pt"):
            if old.name >= f"rank-{workers:05d}.pt":  # of a run with more workers
                old.unlink()
    total = outer.stats().total
    outer.detach()  # the model has the shared weights now, the same on all workers
    with torch.no_grad():
        x, y = batch(-1, 0)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    if rank == 0:
        dense = 2 * (1 - 1 / workers) * 4 * sum(p.numel() for p in model.parameters()) * (outer.steps - first)
        sent = f", 1/{dense / total.traffic:.0f} of dense's bytes" if total.traffic else ", nothing was left to do"
        print(f"{workers} workers, {outer.steps} steps: loss {loss:.3f}{sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
