"""Options of ``attach`` that go together, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsync.collectives import Balanced
from sparsync.compressors import DGCK, ThresholdK, TopK
from sparsync.feedback import is_adam
from sparsync.feedback.momentum import possible


@dataclass(frozen=True)
class Recipe:
    """A preset: what ``attach`` uses for every option that is not given."""

    about: str
    options: Mapping[str, Any]


RECIPES: Mapping[str, Recipe] = {
    # A sign and an Elias-Fano index take 10.2 bits an entry: 0.625 % in the bytes of 0.1 % at 32 + 32 bits.
    "default": Recipe(
        "six times the entries in the bytes of 0.1 %, as signs with one scale; momentum taken out of the optimizer",
        {
            "compressor": ThresholdK(0.00625),
            "scope": "global",
            "values": "sign",
            "indices": "ef",
            "momentum": "move",
        },
    ),
    # Three times 5 % of the entries, 7 bits each: a bit for every entry of the model, of which dense sends 64.
    "balanced": Recipe(
        "5 % of the entries as signs, summed by all workers in parts: a 60th of dense, whatever the number of workers; "
        "momentum of 0.5 before the residual",
        {
            "compressor": ThresholdK(0.05),
            "collective": Balanced(2.0),
            "scope": "global",
            "values": "sign",
            "indices": "ef",
            "momentum": "correct",
            "beta": 0.5,
        },
    ),
    "paper": Recipe(
        "TopK-SGD as published: the 0.1 % largest of the whole model, fp32 values, momentum behind the residual",
        {
            "compressor": TopK(0.001),
            "collective": "allgather",
            "scope": "global",
            "values": "fp32",
            "indices": "int",
            "momentum": "keep",
            "dense_below": 0,
            "dense_1d": False,
        },
    ),
    "dgc": Recipe(
        "Deep Gradient Compression: sampled threshold in every layer, momentum correction of 0.9 with masking",
        {
            "compressor": DGCK(0.001),
            "collective": "allgather",
            "scope": "layer",
            "values": "fp32",
            "indices": "int",
            "momentum": "correct",
            "beta": 0.9,
            "masking": True,
        },
    ),
}

OURS = ("default", "balanced")  # go with every optimizer


def fill_in(recipe: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, where it is not ``None``, over the recipe's options.

    Without a name it is the default recipe, unless a compressor is given: then there is none.
    """
    if recipe is None and given.get("compressor") is None:
        recipe = "default"
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    chosen = {name: value for name, value in given.items() if value is not None}
    preset = RECIPES[recipe].options if recipe is not None else {}
    filled = {**preset, "recipe": recipe, **chosen}
    wanted = filled.get("momentum", "keep")
    adam = recipe in OURS and "momentum" not in chosen and is_adam(chosen.get("optimizer"))
    if filled.setdefault("precondition", adam):
        filled["momentum"] = chosen.get("momentum", "keep")
        return filled
    if "momentum" not in chosen and recipe in OURS:
        filled["momentum"] = possible(wanted, chosen.get("optimizer"))
    _refuse_unused(chosen, wanted, filled.get("momentum", "keep"))
    return filled


def _refuse_unused(chosen: Mapping[str, Any], wanted: str, momentum: str) -> None:
    """Refuse options of momentum correction where there is none: they would be ignored.

    Args:
        wanted: ``momentum`` as the recipe has it, before the optimizer was looked at.
    """
    for name in ("beta", "masking"):
        if name in chosen and momentum != "correct":
            optimizer = chosen.get("optimizer")
            has = "without optimizer= there is" if optimizer is None else f"{type(optimizer).__name__} has"
            why = f": {has} no momentum that could be corrected" if wanted == "correct" else ""
            raise ValueError(
                f"{name}={chosen[name]!r} needs momentum='correct', and momentum is {momentum!r} here{why}"
            )
