"""Lightning on two processes, sparse by one callback; ``--resume`` goes on from the last checkpoint and its residuals.

python examples/lightning/train.py
python examples/lightning/train.py --resume
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import sparsync.hosts.lightning


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=3, help="with --resume twice as many in all")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    pl.seed_everything(0)
    centers = torch.randn(10, 64)
    labels = torch.arange(4000) % 10
    data = TensorDataset(0.25 * centers[labels] + torch.randn(4000, 64), labels)

    checkpoints = ModelCheckpoint(options.folder, save_last=True)
    sync = sparsync.hosts.lightning.Sparsync()  # the line that makes it sparse
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=options.epochs * (2 if options.resume else 1),
        gradient_clip_val=1.0,
        callbacks=[sync, checkpoints],
        logger=False,
        default_root_dir=options.folder,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(data, batch_size=32), ckpt_path="last" if options.resume else None)

    total = sync.stats().total
    dense = 4 * total.steps * sum(parameter.numel() for parameter in model.parameters())  # what a ring of two sends
    loss = float(trainer.callback_metrics["loss"])
    if trainer.is_global_zero:
        print(f"{total.steps} steps, loss {loss:.3f}, a worker sent {total.traffic / dense:.1%} of dense's bytes")
        print(f"{checkpoints.last_model_path} holds the residuals of every rank; --resume goes on from it")


if __name__ == "__main__":
    main()
