"""What the code of P1's authors sets otherwise than our trainings, beside weight decay and density warm-up: each by
itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsync_lab.papers.claims.claim import sentences
from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.differences import MISSING, from_dense, stated_gap
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_runs import training
from sparsync_lab.papers.run import Run, model_title
from sparsync_lab.papers.run_queue import stored_history
from sparsync_lab.papers.vgg16_gap import TITLES, authors_settings, densities

OTHER = "other settings"  # the question
OTHER_ASKED = (
    "P1, figure 6: what else of its authors' settings matters: weight decay of weights alone, LeNet-5's images resized "
    "to 32 x 32 instead of padded, 141 epochs of VGG-16 with a second division of the rate at 122?"
)
LONGER, DIVIDED = 141, (81, 122)  # epochs of their file for VGG-16
SIDE = 32


@dataclass(frozen=True)
class Change:
    """A setting of theirs.

    Args:
        words: what it is.
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


def longer(method: str) -> tuple[Run, Run]:
    """Return trainings of VGG-16 with the authors' settings and as many epochs as in their file, and with 120; both in
    fp32."""
    before = replace(authors_settings("vgg16", method), label=f"{method}, authors' settings, fp32", autocast=False)
    own = replace(
        before, label=f"{before.label}, {LONGER} epochs", epochs=LONGER, warmup=5 / LONGER,
        decay=tuple(epoch / LONGER for epoch in DIVIDED), densities=densities(LONGER) if before.densities else None,
    )  # fmt: skip
    return own, before


def changes() -> tuple[Change, ...]:
    """Return the settings, the most valuable first."""
    alone = "weight decay of weights alone, instead of all parameters"
    return (
        *(Change(alone, model, {method: weights_alone(model, method) for method in TITLES})
          for model in ("lenet5", "resnet20")),
        Change("images resized, instead of padded", "lenet5", {method: resized(method) for method in TITLES}),
        Change(f"{LONGER} epochs, instead of 120 (both in fp32)", "vgg16", {m: longer(m) for m in TITLES}),
    )  # fmt: skip


def other_settings() -> tuple[Run, ...]:
    """Return the trainings that only this question has."""
    ours = [own for change in changes() for own, _ in change.pairs.values()]
    return (*ours, *(longer(method)[1] for method in TITLES))


def without_them() -> tuple[Run, ...]:
    """Return the trainings of other questions and of figure 6 that these are compared with."""
    return tuple(
        before for change in changes() for _, before in change.pairs.values() if before not in other_settings()
    )


def others_told(context: RunContext) -> str:
    """Return what each of these settings changes, as far as it is trained: one seed each."""
    told: dict[str, list[str]] = {}
    for change in changes():
        ends = []
        for method, pair in change.pairs.items():
            found = [stored_history(context.read_only(), run.made(context)) for run in pair]
            with_it, without = (None if one is None else display_score(one.last, one.score) for one in found)
            if with_it is None or without is None:
                ends.append(f"{TITLES[method]} {MISSING}")
                continue
            apart = from_dense(stated_gap(with_it - without), "the same without")
            ends.append(f"{TITLES[method]} {with_it:.2f} % ({apart})")
        told.setdefault(change.words, []).append(f"{model_title(change.model)}, {', '.join(ends)}")
    return sentences(*(f"{words}: {'; '.join(ends)}" for words, ends in told.items())) + " One seed each."
