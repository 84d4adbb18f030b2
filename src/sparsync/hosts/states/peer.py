"""What a rank that is behind, or has just come, takes over from another: weights, optimizer, and what else is named."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module


class PeerState:
    """The state that all ranks of a training have alike.

    Args:
        states: of the user, a scheduler say: anything with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, module: Module, optimizer: torch.optim.Optimizer, states: Sequence[Any] = ()) -> None:
        self.module, self.optimizer, self.states = module, optimizer, list(states)

    def collect(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return it; ``kept``: what this rank keeps, of which residuals and velocities are its own."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "states": [state.state_dict() for state in self.states],
            "sync": {**kept, "residuals": {}, "velocities": {}},
        }

    def load(self, newest: Mapping[str, Any]) -> None:
        """Take over what another rank has collected."""
        self.module.load_state_dict(newest["model"])
        self.optimizer.load_state_dict(newest["optimizer"])
        for state, own in zip(self.states, newest["states"], strict=True):
            state.load_state_dict(own)


def broadcast(own: Mapping[str, Any], source: int, wanted: bool) -> dict[str, Any]:
    """Return what the rank ``source`` has, where that is wanted; all ranks call this."""
    buffer = io.BytesIO()
    if dist.get_rank() == source:
        torch.save(own, buffer)
    size = torch.tensor(buffer.tell(), dtype=torch.int64, device="cpu")
    dist.broadcast(size, source)
    data = torch.frombuffer(bytearray(buffer.getvalue() or int(size)), dtype=torch.uint8)
    dist.broadcast(data, source)
    if not wanted:
        return {}
    found: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    return found


def digest_of(module: Module) -> str:
    """Return a text that differs when any bit of a parameter does."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
