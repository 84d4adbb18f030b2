"""Accelerate on two processes, sparse by one line; ``--resume`` goes on from the last checkpoint.

    torchrun --nproc-per-node=2 examples/accelerate/train.py
    torchrun --nproc-per-node=2 examples/accelerate/train.py --resume
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.nn import Linear, Module, ReLU, Sequential
from torch.utils.data import DataLoader, TensorDataset

import sparsync


class Trained(NamedTuple):
    model: Module
    loss: float
    state: dict
    stats: object


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
