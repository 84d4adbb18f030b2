"""The ways of exchanging gradients among which a chaotic training changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsync import GaussianK


@dataclass(frozen=True)
class ChaosMethod:
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


METHODS: Mapping[str, ChaosMethod] = {
    "topk": ChaosMethod({"compressor": "topk", "density": 0.05}),
    "topk global ef": ChaosMethod({"compressor": "topk", "density": 0.05, "scope": "global", "indices": "ef"}),
    "threshold": ChaosMethod({"compressor": "threshold", "density": 0.05, "scope": "global"}),
    "threshold fp16": ChaosMethod({"compressor": "threshold", "density": 0.1, "values": "fp16"}),
    "gaussian": ChaosMethod({"compressor": "gaussian", "density": 0.05, "scope": "bucket"}, same_bits=False),
    "gaussian layer": ChaosMethod({"compressor": GaussianK(0.05, refine=True)}),
    "dgc bf16": ChaosMethod({"compressor": "dgc", "density": 0.05, "values": "bf16"}),
    "trimmed": ChaosMethod({"compressor": "trimmed", "density": 0.05}),
    "random shared": ChaosMethod({"compressor": "random", "density": 0.1, "collective": "shared"}, same_bits=False),
    "block": ChaosMethod({"compressor": "block", "density": 0.1}),
    "gtopk": ChaosMethod({"compressor": "topk", "density": 0.05, "collective": "gtopk"}),
    "balanced": ChaosMethod({"compressor": "topk", "density": 0.05, "collective": "balanced", "scope": "global"}),
    "balanced levels": ChaosMethod(
        {"compressor": "threshold", "density": 0.1, "collective": "balanced", "values": "levels", "indices": "ef"},
        same_bits=False,
    ),
    "sign": ChaosMethod({"compressor": "topk", "density": 0.1, "values": "sign", "indices": "ef"}),
    "none": ChaosMethod({"compressor": "none"}, same_bits=False),
    "follows the rate": ChaosMethod({"compressor": "topk", "density": 0.05, "follow_lr": True}),
    "budget": ChaosMethod({"compressor": "threshold", "budget": 1 / 4, "total_steps": 2000}, same_bits=False),
    "nodes": ChaosMethod({"compressor": "topk", "density": 0.05}, nodes=True),
    "moved": ChaosMethod({"compressor": "topk", "density": 0.05, "momentum": "move"}, optimizer="momentum"),
    "corrected": ChaosMethod(
        {"compressor": "topk", "density": 0.05, "momentum": "correct"}, keeps="velocities", optimizer="momentum"
    ),
    "corrected, no mask": ChaosMethod(
        {"compressor": "threshold", "density": 0.05, "momentum": "correct", "beta": 0.7, "masking": False},
        keeps="velocities",
        optimizer="momentum",
    ),
    "default": ChaosMethod({"recipe": "default", "total_steps": 2000}, keeps="velocities", optimizer="momentum"),
    "AdamW": ChaosMethod(
        {"compressor": "threshold", "density": 0.05, "precondition": True}, keeps="updates", optimizer="adamw"
    ),
    "AdamW default": ChaosMethod(
        {"recipe": "default", "total_steps": 2000}, keeps="updates", optimizer="adamw", same_bits=False
    ),
}
