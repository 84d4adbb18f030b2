"""Options of ``attach`` that go together, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsync.collectives import Balanced
from sparsync.compressors import DGCK, ThresholdK, TopK
from sparsync.config.budget import DEFAULT, FOLLOWS, Budget
from sparsync.feedback import is_adam
from sparsync.feedback.momentum import possible


@dataclass(frozen=True)
class Recipe:
    """A preset: what ``attach`` uses for every option that is not given."""

    about: str
    options: Mapping[str, Any]


AUTO = "auto"

# Until P is known, and where a density is given: signs and Elias-Fano indices, 10.2 bits an entry at 0.625 %, which is
# a 62nd of dense with 16 workers.
BEST_KNOWN = {
    "budget": DEFAULT,
    "compressor": ThresholdK(0.00625),
    "scope": "global",
    "values": "sign",
    "indices": "ef",
    "momentum": "correct",
    "beta": 0.5,
}
RECIPES: Mapping[str, Recipe] = {
    "default": Recipe(
        "a 60th of dense's bytes, more of them in the first steps; momentum of 0.5 before the residual", BEST_KNOWN
    ),
    AUTO: Recipe(
        "default, or another way within its budget, or dense in bf16: what is fastest here and now", BEST_KNOWN
    ),
    # Three times 5 % of the entries, 7 bits each: a bit for every entry of the model, of which dense sends 64.
    "balanced": Recipe(
        "5 % of the entries as signs, summed by all workers in parts: about a 60th of dense, whatever the number of "
        "workers; momentum of 0.5 before the residual",
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

OURS = ("default", "balanced", AUTO)  # go with every optimizer


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
    filled["momentum_asked"] = "momentum" in chosen or preset.get("momentum") == "keep"
    adam = recipe in OURS and "momentum" not in chosen and is_adam(chosen.get("optimizer"))
    if filled.setdefault("precondition", adam):
        if "masking" in chosen:
            raise ValueError("masking= is of momentum='correct', and this optimizer's updates are preconditioned")
        return {**filled, "momentum": chosen.get("momentum", "keep"), "beta": chosen.get("beta", "auto")}
    if "momentum" not in chosen and recipe in OURS:
        filled["momentum"] = possible(wanted, chosen.get("optimizer"))
    _refuse_unused(chosen, wanted, filled.get("momentum", "keep"))
    if "second_moment" in chosen:
        raise ValueError("second_moment= needs precondition=True, which optimizer= of torch's Adam or AdamW brings")
    return filled


def take_budget(filled: dict[str, Any], given: Mapping[str, Any]) -> Budget | None:
    """Take the budget, if there is one, out of what ``fill_in`` returned; ``given``: what it was made of.

    A density that is given, or a compressor with its own, goes before a recipe's budget. What a recipe without a budget
    says is as if it were given.
    """
    share, steps = filled.pop("budget", None), filled.pop("total_steps", None)
    chosen = {name for name, value in given.items() if value is not None}
    asked = "budget" in chosen
    if asked and "density" in chosen:
        raise ValueError("budget= and density= were both given: the density follows from a budget")
    if share is None or (not asked and not chosen.isdisjoint(("density", "compressor"))):
        if steps is not None:
            raise ValueError("total_steps= needs budget=: it says over how many steps that is spent")
        return None
    preset = RECIPES[filled["recipe"]].options if filled["recipe"] else {}
    chosen |= set() if "budget" in preset else set(preset)
    return Budget(share, steps, tuple(sorted(chosen.intersection(FOLLOWS))), asked)


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
