"""Settings and outcome of a training: plain values that convert to JSON and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsync.feedback.momentum import MOMENTA
from sparsync_lab import models
from sparsync_lab.data import DATA, SHAPES
from sparsync_lab.training.methods import check_options, has_budget, method_options

T = TypeVar("T")
SGD, ADAMW = "sgd", "adamw"
RATES = {SGD: 0.02, ADAMW: 0.002}  # learning rates where none is given


@dataclass(frozen=True)
class Training:
    """The settings of a training.

    Args:
        method: how gradients are exchanged: ``"dense"`` (plain DDP), a recipe's name, a compressor's name, or a
            compressor and a collective as in ``"random+shared"``.
        data: ``"digits"``, ``"mnist"``, ``"cifar10"`` or ``"cifar10-half"``.
        model: ``"mlp"``, ``"lenet5"``, on MNIST ``"fnn3"``, on CIFAR-10 ``"resnet20"``, ``"vgg16"`` or ``"resnet18"``.
        density: share of the entries to send, in (0, 1]; ``None``: the method's own. So for the next four.
        scope: where the largest entries are looked for: ``"layer"``, ``"bucket"``, ``"global"``.
        values: how values travel: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"sign"``, ``"levels"``.
        indices: how indices travel: ``"int"``, ``"ef"``.
        momentum_mode: what becomes of SGD's momentum: ``attach``'s ``momentum``.
        seed: of the initial weights, the order of the images and the random methods.
        steps: of the optimizer.
        batch: images per worker and step.
        rate: learning rate, after a linear warm-up of 10 steps.
        momentum: of SGD, in [0, 1); with AdamW its first beta.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    method: str = "default"
    data: str = "digits"
    model: str = "mlp"
    density: float | None = None
    scope: str | None = None
    values: str | None = None
    indices: str | None = None
    momentum_mode: str | None = None
    seed: int = 0
    steps: int = 300
    batch: int = 32
    rate: float = RATES[SGD]
    momentum: float = 0.9
    optimizer: str = SGD

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise ValueError(f"data must be one of {', '.join(DATA)}, got {self.data!r}")
        models.check_model(self.model, *SHAPES[self.data])
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**31):
            raise ValueError(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ValueError(f"steps must be 1 or more, got {self.steps}")
        if not (isinstance(self.batch, int) and self.batch >= 1):
            raise ValueError(f"batch must be 1 or more, got {self.batch}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0, got {self.rate:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be 0 or more and below 1, got {self.momentum:g}")
        if self.optimizer not in RATES:
            raise ValueError(f"optimizer must be one of {', '.join(RATES)}, got {self.optimizer!r}")
        if self.momentum_mode not in (None, *MOMENTA):
            raise ValueError(f"momentum_mode must be one of {', '.join(MOMENTA)}, got {self.momentum_mode!r}")
        if self.optimizer == ADAMW and self.momentum_mode not in (None, "keep"):
            raise ValueError(f"momentum_mode {self.momentum_mode!r} is for sgd's momentum, and the optimizer is adamw")
        options = attach_options(self)
        if options is not None:
            check_options(options)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Training:
        return _from_json(cls, {"optimizer": SGD, **plain})  # which older ones do not name


def attach_options(training: Training) -> dict[str, Any] | None:
    """Return the keyword arguments of ``sparsync.attach`` for this training, all but ``optimizer``; ``None`` for plain
    DDP."""
    options = method_options(
        training.method,
        density=training.density,
        scope=training.scope,
        values=training.values,
        indices=training.indices,
        momentum=training.momentum_mode,
    )
    if options is None:
        return None
    if training.density is None and has_budget(options):
        options["total_steps"] = training.steps
    return options | {"seed": training.seed}


@dataclass(frozen=True)
class Point:
    """A point of the curve of a training, after ``step`` steps.

    Args:
        loss: mean training loss of rank 0's batches since the point before; NaN once weights are not finite.
        accuracy: share of the test images that are classified correctly.
        bytes: put on the network by one worker, since step 0.
    """

    step: int
    loss: float
    accuracy: float
    bytes: float

    def to_json(self) -> dict[str, Any]:
        return _to_json(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Point:
        return _from_json(cls, plain)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Args:
        numel: parameters of the model.
        accuracy: share of the test images that are classified correctly after the last step.
        bytes: put on the network by one worker in a step, mean over all steps.
        dense_bytes: the same for plain DDP in fp32.
        density: share of the entries that was sent, over all steps; small tensors, which travel dense, included.
        step_s: median time of a step in seconds, the first few left out; of the last session, if it was resumed.
        curve: the training at about ten of its steps, the last among them.
    """

    training: Training
    workers: int
    numel: int
    accuracy: float
    bytes: float
    dense_bytes: float
    density: float
    step_s: float
    curve: list[Point]

    @property
    def diverged(self) -> bool:
        """Whether loss or weights ended as NaN or infinity."""
        return not math.isfinite(self.curve[-1].loss)

    def to_json(self) -> dict[str, Any]:
        nested = {"training": self.training.to_json(), "curve": [point.to_json() for point in self.curve]}
        return _to_json(self) | nested

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Outcome:
        training = Training.from_json(plain["training"])
        curve = [Point.from_json(point) for point in plain["curve"]]
        return _from_json(cls, {**plain, "training": training, "curve": curve})


def rates_text() -> str:
    """Return the learning rates where none is given."""
    return ", ".join(f"{rate:g} with {optimizer}" for optimizer, rate in RATES.items())


def dense_bytes(numel: int, workers: int) -> float:
    """Return the bytes that a worker puts on the network when plain DDP averages ``numel`` fp32 entries in a ring."""
    return 2 * (workers - 1) / workers * numel * 4


def _to_json(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; JSON has no NaN, so what is not finite becomes ``None``."""
    found = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def _from_json(cls: type[T], plain: Mapping[str, Any]) -> T:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = {field.name for field in fields}
    if set(plain) != names:
        odd = sorted(set(plain) ^ names)
        raise ValueError(f"{cls.__name__} has fields that are missing or unknown: {', '.join(odd)}")
    floats = {field.name for field in fields if field.type == "float"}
    values = {k: math.nan if v is None and k in floats else v for k, v in plain.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__} has a value of the wrong kind: {error}") from None
