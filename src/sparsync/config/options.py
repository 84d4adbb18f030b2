"""The options of ``attach``, checked and resolved into one frozen plan, which everything else reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives import Collective
from sparsync.collectives.comm.channel import check_deadline
from sparsync.compressors import Compressor
from sparsync.config.budget import Budget, Spending
from sparsync.config.nodes import PerNode, check_per_node
from sparsync.config.recipes import AUTO, OURS, RECIPES, fill_in, take_budget
from sparsync.config.registry import compressors, make_collective, make_compressor
from sparsync.feedback import MOMENTA, Correction, Preconditioning, is_sgd, rules_of
from sparsync.layout import SCOPES, Matrices, Parameter
from sparsync.number_checks import is_number, is_whole
from sparsync.schedule import Schedule, as_schedule
from sparsync.wire import Wire

FLAGS = ("masking", "precondition", "transactional", "dense_1d", "follow_lr", "debug")
JOINED = ("drain", "freeze")  # what a rank without data does with its residual
ON_LOSS = ("raise", "continue")  # what the others do when a rank is lost


@dataclass(frozen=True)
class ExchangePlan:
    """How gradients are exchanged: the options of ``attach`` (see there) with names made into objects.

    With a ``budget`` it is complete once P and the parameters are known: ``engine.budget.within_budget`` returns it
    with the densities and codecs that follow, with ``spending``, which says what came of it, and with ``dense``: the
    names of what travels dense.
    ``momentum_asked``: whether momentum was decided on, by the user or by a recipe that keeps it.
    """

    compressor: Compressor
    collective: Collective
    density: Schedule
    indices: str
    scope: str = "layer"
    values: str = "fp32"
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    momentum: str = "keep"
    momentum_asked: bool = False
    beta: float | str = 0.5
    masking: bool = True
    precondition: bool = False
    second_moment: str = "sketch"
    clip: float | None = None
    transactional: bool = False
    dense_below: int = 1024
    dense_1d: bool = True
    follow_lr: bool = False
    joined: str = "drain"
    per_node: PerNode = 1
    deadline: float = 300.0
    seed: int = 0
    debug: bool = False
    on_loss: str = "raise"
    recipe: str | None = None
    budget: Budget | None = None
    spending: Spending | None = None
    dense: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {self.scope!r}")
        if self.joined not in JOINED:
            raise ValueError(f"joined must be one of {', '.join(JOINED)}, got {self.joined!r}")
        if not (is_whole(self.dense_below) and self.dense_below >= 0):
            raise ValueError(f"dense_below must be 0 or more entries, got {self.dense_below!r}")
        if self.on_loss not in ON_LOSS:
            raise ValueError(f"on_loss must be one of {', '.join(ON_LOSS)}, got {self.on_loss!r}")
        check_deadline(self.deadline)
        if not is_whole(self.seed):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        object.__setattr__(self, "per_node", check_per_node(self.per_node))
        if self.per_node != 1 and not self.collective.node_sums:
            name = type(self.collective).__name__
            raise ValueError(f"per_node= needs a collective that divides by channel.divisor, which {name} does not say")
        if self.follow_lr and self.optimizer is None:
            raise ValueError("follow_lr=True needs optimizer=, to read its learning rates")
        if self.momentum not in MOMENTA:
            raise ValueError(f"momentum must be one of {', '.join(MOMENTA)}, got {self.momentum!r}")
        if self.momentum == "move" and self.optimizer is None:
            raise ValueError("momentum='move' needs optimizer=, to take it out of")
        if self.clip is not None and not (is_number(self.clip) and self.clip > 0):
            raise ValueError(f"clip must be a norm above 0, got {self.clip!r}")
        if self.indices == "block" and not _sends_blocks(self.compressor, self.collective, self.values):
            raise ValueError("indices='block' needs a compressor that sends blocks and collective='allgather'")
        if self.precondition:
            self._check_preconditioning()
        if self.momentum == "correct":
            Correction(self.beta, self.masking)  # type: ignore[arg-type]  # which refuses a bad beta
        self.collective.check(self.wire, self.compressor.dense, self.compressor.random)

    def _check_preconditioning(self) -> None:
        rules_of(self.optimizer)  # which refuses what is not known
        assert self.preconditioning is not None  # which refuses a bad beta
        if self.momentum != "keep" or self.follow_lr:
            raise ValueError("precondition=True has momentum and learning rate before the residual by itself")
        if self.compressor.dense:
            raise ValueError("precondition=True is for entries that are chosen, and this compressor sends them all")

    @cached_property
    def wire(self) -> Wire:
        """The format of messages."""
        return Wire(self.values, self.indices)

    @cached_property
    def correction(self) -> Correction | None:
        """Momentum correction, if any."""
        return Correction(float(self.beta), self.masking) if self.momentum == "correct" else None

    @cached_property
    def preconditioning(self) -> Preconditioning | None:
        """Preconditioned feedback, if any."""
        if not self.precondition:
            return None
        return Preconditioning(self.beta, self.second_moment, sgd=is_sgd(self.optimizer))

    @property
    def unit_scope(self) -> str:
        """The scope in which units are cut: where every entry is sent, a bucket is as good as any."""
        return "bucket" if self.compressor.dense else self.scope

    @property
    def keeps_residuals(self) -> bool:
        """Whether anything can be kept: not if every entry is sent as it is."""
        return not self.compressor.dense or self.wire.codec.round is not None or self.correction is not None

    @property
    def auto(self) -> bool:
        """Whether this plan is one of several, of which the fastest is on: one that compresses nothing is the only."""
        return self.recipe == AUTO and not self.compressor.dense

    def density_at(self, step: int) -> float:
        """Return the share of the entries that is sent in a step."""
        return 1.0 if self.compressor.dense else self.density(step)

    def dense_names(self, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the names of the parameters that travel dense: 1-D, or small, as far as a budget allows it."""
        if self.compressor.dense:
            return frozenset()
        if self.dense is not None:
            return self.dense
        if self.precondition:  # whoever is not worth a sketch is known exactly, and so travels dense
            worth = {n for n, p in parameters.items() if Matrices.of(Parameter.of(n, p)) is not None}
            return frozenset(n for n, p in parameters.items() if n not in worth or p.numel() < self.dense_below)
        small = (n for n, p in parameters.items() if p.numel() < self.dense_below or (self.dense_1d and p.dim() < 2))
        return frozenset(small)

    def configuration(self, dense_names: frozenset[str]) -> str:
        """Return everything that must be the same on every rank, a line each."""
        lines = {
            "compressor": _text(self.compressor),
            "collective": _text(self.collective),
            "scope": self.scope,
            "density": [self.density(step) for step in (0, 1, 10, 100, 1000, 10_000, 100_000)],
            "budget": self.budget,
            "values": self.values,
            "indices": self.indices,
            "transactional": self.transactional,
            "dense": sorted(dense_names),
            "momentum": self.momentum,
            "correction": self.correction,
            "preconditioning": self.preconditioning,
            "clip": self.clip,
            "follow_lr": self.follow_lr,
            "joined": self.joined,
            "per_node": self.per_node,
            "seed": self.seed,
            "debug": self.debug,
            **({AUTO: True} if self.auto else {}),
            **({"on_loss": self.on_loss} if self.on_loss != "raise" else {}),
        }
        return "\n".join(f"{key}={value}" for key, value in lines.items())

    def describe(self, step: int, momentum_taken: str | None) -> dict[str, str]:
        """Return the plan in words, a line each; ``momentum_taken``: what was done to the optimizer, if anything."""
        scope = f"scope {self.scope}, density {self.density(step):g} now, of what is compressed"
        form = f"values as {self.values}" + ("" if self.compressor.dense else f", indices as {self.indices}")
        lines = {
            "recipe": self.recipe or "none",
            "compressor": f"{type(self.compressor).__name__} ({'every entry' if self.compressor.dense else scope})",
            "collective": f"{type(self.collective).__name__}, {form}",
            "transaction": "yes, steps can be undone" if self.transactional else "no",
        }
        if self.budget is not None and self.spending is not None:
            lines["budget"] = self.spending.describe(self.budget)
        momentum = [momentum_taken] if momentum_taken else []
        if self.correction is not None:
            masking = "with" if self.correction.masking else "without"
            momentum.append(f"{self.correction.beta:g} before the residual, {masking} masking")
        if self.preconditioning is not None:
            beta, kind = self.preconditioning.beta, self.preconditioning.second_moment
            known = {"own": "the optimizer's own", "auto": "0.5 where few entries are sent, up to the optimizer's own"}
            momentum.append(known.get(str(beta), f"{beta}"))
            squares = "of rows and columns" if kind == "sketch" else "of every entry"
            lines["update"] = (
                f"made by each worker, learning rate included, with a second moment that all share ({squares}); what "
                "is not sent of it is kept"
            )
        if self.optimizer is None and self.recipe in OURS and self.joined != "freeze":
            momentum.append("the optimizer's is not known here and stays; pass optimizer=")
        if momentum:
            lines["momentum"] = "; ".join(momentum)
        if self.clip is not None:
            whose = "the mean gradient" if self.precondition else "each worker's gradient"
            lines["clipping"] = f"{whose}, at a norm of {self.clip:g}{'' if self.precondition else ' a segment'}"
        if self.on_loss == "continue":
            lines["lost ranks"] = "the others go on, within sync.surviving()"
        return lines


def resolve(recipe: str | None = None, **given: Any) -> ExchangePlan:
    """Return the plan of what is given (``None``: not) and a recipe's name; refuse what does not fit."""
    known = {field.name for field in fields(ExchangePlan)} - {"spending", "dense"}
    unknown = set(given) - known - {"total_steps"}
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    for name in FLAGS:
        if not isinstance(given.get(name), bool | None):
            raise ValueError(f"{name} must be True or False, got {given[name]!r}")
    scaler = given.get("scaler")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ValueError(f"scaler must be the GradScaler that is used, got {scaler!r}")
    if scaler is not None and given.get("transactional") is False:
        raise ValueError("scaler= needs steps that can be undone: leave transactional out, or set it to True")
    if given.get("compressor") == AUTO:  # reads like one in a call
        if recipe not in (None, AUTO):
            raise ValueError(f"compressor='auto' and recipe={recipe!r} were both given: leave one out")
        recipe, given = AUTO, {**given, "compressor": None}
    named = given.get("compressor")
    if isinstance(named, str) and named in RECIPES and named not in compressors():
        raise ValueError(f"{named!r} is a recipe and no compressor: pass recipe={named!r}")
    filled = fill_in(recipe, given)
    if recipe == AUTO:
        _refuse_with_auto(filled)
    budget = take_budget(filled, given)
    compressor = make_compressor(filled.pop("compressor", "threshold"))
    if budget is not None and compressor.dense:
        raise ValueError(
            "budget= needs a compressor that chooses entries, and this one sends all of them; leave it out"
        )
    collective = make_collective(filled.pop("collective", None), compressor)
    density = as_schedule(filled.pop("density", compressor.density))
    usual = "int" if budget is None else "ef"
    blocks = _sends_blocks(compressor, collective, filled.get("values", "fp32"))
    indices = filled.pop("indices", "block" if blocks else usual)
    survives = filled.get("on_loss") == "continue"
    if survives:
        _refuse_to_survive(filled, recipe)
    transactional = bool(filled.pop("transactional", False)) or filled.get("scaler") is not None or survives
    return ExchangePlan(compressor, collective, density, indices, transactional=transactional, budget=budget, **filled)


def _refuse_with_auto(filled: Mapping[str, Any]) -> None:
    """Refuse options that dense steps do not have."""
    clips = filled.get("clip") is not None and not filled["precondition"]
    for name in ("scaler", "transactional", "debug", *(["clip"] if clips else [])):
        if filled.get(name):
            raise ValueError(f"'auto' does not go with {name}= yet: take recipe='default', or leave {name}= out")
    if filled.get("per_node", 1) != 1:
        raise ValueError("'auto' does not go with per_node= yet: take recipe='default', or leave per_node= out")


def _refuse_to_survive(filled: Mapping[str, Any], recipe: str | None) -> None:
    """Refuse options with which a training cannot go on without a rank."""
    if filled.get("optimizer") is None:
        raise ValueError("on_loss='continue' needs optimizer=: whoever is behind takes its state from another rank")
    if filled.get("transactional") is False:
        raise ValueError("on_loss='continue' needs steps that can be undone: leave transactional out")
    if filled.get("scaler") is not None or filled.get("per_node", 1) != 1 or recipe == AUTO:
        raise ValueError("on_loss='continue' does not go with scaler=, per_node= and 'auto' yet")


def _sends_blocks(compressor: Compressor, collective: Collective, values: str) -> bool:
    """Return whether a block's start can stand for its indices; signs cannot tell a block's zeros."""
    return compressor.block and collective.blocks and not Wire(values).codec.signs


def _text(method: object) -> str:
    """Return a method's configuration; one that does not print it is taken for its class."""
    text = repr(method)
    return type(method).__qualname__ if " at 0x" in text else text
