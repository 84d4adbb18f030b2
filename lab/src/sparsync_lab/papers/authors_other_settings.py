"""What the code of P1's authors sets otherwise than our trainings, beside weight decay and density warm-up: each by
itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.differences import POINT, by_spread, from_dense, stated_gap
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_runs import training
from sparsync_lab.papers.run import Run, model_title
from sparsync_lab.papers.run_queue import stored_history
from sparsync_lab.papers.vgg16_gap import TITLES, authors_settings, densities

OTHER_SETTINGS = "other settings"  # the question
OTHER_ASKED = (
    "P1, figure 6: what else of its authors' settings matters: weight decay of weights alone, LeNet-5's images resized "
    "to 32 x 32 instead of padded, its 80 epochs, 141 epochs of VGG-16 with a second division of the rate at 122?"
)
EPOCHS = {"lenet5": 80, "vgg16": 141}  # of the files in their code; figure 6 has 120
DIVIDED = (81, 122)  # epochs after which the rate is divided by 10
SIDE = 32


@dataclass(frozen=True)
class Change:
    """A setting of theirs.

    Args:
        words: what it is.
        model: that is trained with it and without.
        pairs: by method, the training with it and the same without.
    """

    words: str
    model: str
    pairs: dict[str, tuple[Run, Run]]


def weights_alone(model: str, method: str) -> tuple[Run, Run]:
    """Return a training with the authors' settings whose weight decay leaves biases and norms alone, and the other."""
    before = authors_settings(model, method)
    return replace(before, label=f"{before.label}, decay of weights alone", decays_weights_only=True), before


def resized(method: str) -> tuple[Run, Run]:
    """Return a training of LeNet-5 with images resized as the authors' code does it, and figure 6's."""
    return training("lenet5", method, label=f"{method}, images resized", resized=SIDE), training("lenet5", method)


def with_their_epochs(model: str, method: str) -> tuple[Run, Run]:
    """Return trainings with the authors' settings, for as many epochs as in their file for the model, and for 120; of
    VGG-16 both in fp32."""
    before = authors_settings(model, method)
    if model == "vgg16":
        before = replace(before, label=f"{before.label}, fp32", autocast=False)
    epochs = EPOCHS[model]
    own = replace(
        before, label=f"{before.label}, {epochs} epochs", epochs=epochs, warmup=5 / epochs,
        decay=tuple(epoch / epochs for epoch in DIVIDED if epoch < epochs),
        densities=densities(epochs) if before.densities else None,
    )  # fmt: skip
    return own, before


def changes() -> tuple[Change, ...]:
    """Return the settings, the most valuable first."""
    alone = "weight decay of weights alone, instead of all parameters"
    return (
        *(Change(alone, model, {method: weights_alone(model, method) for method in TITLES})
          for model in ("lenet5", "resnet20")),
        Change("images resized, instead of padded", "lenet5", {method: resized(method) for method in TITLES}),
        *(Change(f"{epochs} epochs, instead of 120", model, {m: with_their_epochs(model, m) for m in TITLES})
          for model, epochs in EPOCHS.items()),
    )  # fmt: skip


def other_settings() -> tuple[Run, ...]:
    """Return the trainings that only this question has."""
    ours = [own for change in changes() for own, _ in change.pairs.values()]
    return (*ours, *(with_their_epochs("vgg16", method)[1] for method in TITLES))


def without_them() -> tuple[Run, ...]:
    """Return the trainings of other questions and of figure 6 that these are compared with."""
    own = other_settings()
    return tuple(before for change in changes() for _, before in change.pairs.values() if before not in own)


def others_told(context: RunContext, spread: float) -> str:
    """Return what each of these settings changes, as far as it is trained, one seed each; and which are not.

    Args:
        spread: by how many points trainings of VGG-16 differ anyway.
    """
    told: dict[str, list[str]] = {}
    missing = []
    for change in changes():
        ends = []
        for method, pair in change.pairs.items():
            found = [stored_history(context.read_only(), run.made(context)) for run in pair]
            own, before = (None if one is None else display_score(one.last, one.score) for one in found)
            if own is not None and before is not None:
                apart = by_spread(stated_gap(own - before), spread if change.model == "vgg16" else POINT)
                ends.append(f"{TITLES[method]} {own:.2f} % ({from_dense(apart, 'without')})")
        if ends:
            told.setdefault(change.words, []).append(f"{model_title(change.model)}, {', '.join(ends)}")
        if len(ends) < len(change.pairs):
            missing.append(f"{model_title(change.model)}, {change.words}")
    each = "; ".join(f"{words}: {'; '.join(ends)}" for words, ends in told.items())
    measured = f"Of what else that code sets, each by itself: {each} (one seed each)." if told else ""
    rest = f"Not run, so that the effect is not known: {'; '.join(missing)}." if missing else ""
    return f"{measured} {rest}".strip()
