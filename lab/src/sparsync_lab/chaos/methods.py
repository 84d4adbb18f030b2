"""The ways of exchanging gradients among which a chaotic training changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsync import GaussianK


@dataclass(frozen=True)
class Method:
    """How gradients are exchanged.

    Args:
        options: of ``attach``.
        keeps: what its state holds: ``"gradients"``, ``"velocities"`` as well, or ``"updates"`` (of AdamW).
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adamw"``.
        nodes: pairs of ranks share a machine.
        same_bits: whether a restart from a checkpoint makes the same bits: not where buckets decide, which DDP regroups
            after its first step, be it which entries are sent, who sums them, or in which order the backend adds.
    """

    options: Mapping[str, Any]
    keeps: str = "gradients"
    optimizer: str = "sgd"
    nodes: bool = False
    same_bits: bool = True

    @property
    def beta(self) -> float | None:
        """Momentum before the residual, if there is any."""
        return self.options.get("beta", 0.5) if self.keeps == "velocities" else None


METHODS: Mapping[str, Method] = {
    "topk": Method({"compressor": "topk", "density": 0.05}),
    "topk global ef": Method({"compressor": "topk", "density": 0.05, "scope": "global", "indices": "ef"}),
    "threshold": Method({"compressor": "threshold", "density": 0.05, "scope": "global"}),
    "threshold fp16": Method({"compressor": "threshold", "density": 0.1, "values": "fp16"}),
    "gaussian": Method({"compressor": "gaussian", "density": 0.05, "scope": "bucket"}, same_bits=False),
    "gaussian layer": Method({"compressor": GaussianK(0.05, refine=True)}),
    "dgc bf16": Method({"compressor": "dgc", "density": 0.05, "values": "bf16"}),
    "trimmed": Method({"compressor": "trimmed", "density": 0.05}),
    "random shared": Method({"compressor": "random", "density": 0.1, "collective": "shared"}, same_bits=False),
    "block": Method({"compressor": "block", "density": 0.1}),
    "gtopk": Method({"compressor": "topk", "density": 0.05, "collective": "gtopk"}),
    "gtopk sign": Method({"compressor": "topk", "density": 0.05, "collective": "gtopk", "values": "sign"}),
    "balanced": Method({"compressor": "topk", "density": 0.05, "collective": "balanced", "scope": "global"}),
    "balanced levels": Method(
        {"compressor": "threshold", "density": 0.1, "collective": "balanced", "values": "levels", "indices": "ef"},
        same_bits=False,
    ),
    "sign": Method({"compressor": "topk", "density": 0.1, "values": "sign", "indices": "ef"}),
    "none": Method({"compressor": "none"}, same_bits=False),
    "follows the rate": Method({"compressor": "topk", "density": 0.05, "follow_lr": True}),
    "budget": Method({"compressor": "threshold", "budget": 1 / 4, "total_steps": 2000}, same_bits=False),
    "nodes": Method({"compressor": "topk", "density": 0.05}, nodes=True),
    "moved": Method({"compressor": "topk", "density": 0.05, "momentum": "move"}, optimizer="momentum"),
    "corrected": Method(
        {"compressor": "topk", "density": 0.05, "momentum": "correct"}, keeps="velocities", optimizer="momentum"
    ),
    "corrected, no mask": Method(
        {"compressor": "threshold", "density": 0.05, "momentum": "correct", "beta": 0.7, "masking": False},
        keeps="velocities",
        optimizer="momentum",
    ),
    "default": Method({"recipe": "default", "total_steps": 2000}, keeps="velocities", optimizer="momentum"),
    "AdamW": Method(
        {"compressor": "threshold", "density": 0.05, "precondition": True}, keeps="updates", optimizer="adamw"
    ),
    "AdamW default": Method(
        {"recipe": "default", "total_steps": 2000}, keeps="updates", optimizer="adamw", same_bits=False
    ),
}
