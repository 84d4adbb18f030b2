"""The code blocks of the pages, and the names that each page's Python finds."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.docs.__main__ import pages

ROOT = Path(__file__).parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in pages(ROOT)]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]*?) -->\n\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAM = 'if __name__ == "__main__":'  # in a block that is a file of its own


@dataclass(frozen=True)
class Block:
    """A block of a page; ``why`` says why it is not run."""

    kind: str
    code: str
    why: str | None


def blocks_of(page: str, kind: str) -> list[Block]:
    """Return a page's blocks of a language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = (Block(match["kind"], match["code"], match["why"]) for match in FENCE.finditer(text))
    return [block for block in found if block.kind == kind]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def common_names() -> dict[str, Any]:
    """Return what every page may speak of: a model in DDP, its optimizer, data and a loss."""
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    loader = [(torch.randn(8, 256), torch.randint(10, (8,))) for _ in range(8)]
    names = {"contextlib": contextlib, "torch": torch, "dist": dist, "sparsync": sparsync, "ddp": ddp}
    names |= {"optimizer": optimizer, "loader": loader, "loss_fn": nn.functional.cross_entropy}
    return names | {"model": ddp.module}


def case_each_by_itself(rank: int, size: int, folder: str, blocks: list[str]) -> None:
    """Run the blocks of a page in a folder, each with a model of its own."""
    os.chdir(folder)
    for number, code in enumerate(blocks):
        torch.manual_seed(number)
        names = common_names()
        ddp = names["ddp"]
        before = [p.detach().clone() for p in ddp.parameters()]
        exec(compile(code, f"block {number}", "exec"), names)
        trained = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert trained == ("optimizer.step()" in code or "scaler.step(" in code), code
        _detach(names)
        del ddp, names


def case_together(rank: int, size: int, folder: str, blocks: list[str], setup: str) -> None:
    """Run the blocks of a page one after another, each with what those before it have left."""
    os.chdir(folder)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    torch.manual_seed(0)
    names = {"torch": torch, "dist": dist, "sparsync": sparsync} | SETUPS[setup]()
    for number, code in enumerate(blocks):
        if re.search(r"^sync = ", code, re.MULTILINE):
            _detach(names)
        exec(compile(code, f"block {number}", "exec"), names)
    _detach(names)
    for name in ("ddp", "model", "trainer", "accelerator"):
        names.pop(name, None)
    gc.collect()


def _detach(names: dict[str, Any]) -> None:
    handle = names.get("sync", names.get("state"))
    if isinstance(handle, sparsync.Handle):
        handle.detach()


def _transformers() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [(start + torch.arange(16)) % 64 for start in range(16)]
    return {"model": GPT2LMHeadModel(config), "data": [{"input_ids": row, "labels": row} for row in rows]}


def _accelerate() -> dict[str, Any]:
    from torch.utils.data import DataLoader

    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` does
    model = net()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batches": DataLoader([0.0] * 8)}


def _lightning() -> dict[str, Any]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = TensorDataset(torch.randn(64, 256), torch.arange(64) % 10)
    return {"model": Classifier(), "data": DataLoader(data, batch_size=8)}


def _fsdp() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
    on_cpus = lambda device, *shape, **options: init_device_mesh("cpu", *shape, **options)  # noqa: E731
    names = {"model": model, "init_device_mesh": on_cpus, "fully_shard": fully_shard}
    return names | {"replicas": dist.get_world_size(), "shards": 1}


class Writer:
    """The calls of W&B and of a SummaryWriter that the documentation has."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.rows += [(name, value, step) for name, value in data.items()]

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


def _loggers() -> dict[str, Any]:
    names = common_names()
    names["sync"] = sparsync.attach(names["ddp"], optimizer=names["optimizer"])

    def train_step() -> None:
        x, y = names["loader"][0]
        names["optimizer"].zero_grad()
        names["loss_fn"](names["ddp"](x), y).backward()
        names["optimizer"].step()

    train_step()
    return names | {"wandb": Writer(), "writer": Writer(), "step": 1, "train_step": train_step}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/frameworks/transformers.md": _transformers,
    "docs/frameworks/accelerate.md": _accelerate,
    "docs/frameworks/lightning.md": _lightning,
    "docs/frameworks/fsdp.md": _fsdp,
    "docs/frameworks/loggers.md": _loggers,
}
