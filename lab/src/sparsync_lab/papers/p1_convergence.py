"""P1's figures 1 and 6: trainings with its settings, and what differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparsync_lab.papers.authors_other_settings import others_told
from sparsync_lab.papers.curves import (
    base_result,
    by_epoch,
    by_seed,
    quick_changes,
    scores,
    spread_caption,
)
from sparsync_lab.papers.differences import in_words
from sparsync_lab.papers.gaussian_forms import (
    FORM_NOTES,
    count_figures,
    every_seed,
    fallback_note,
    looks_of,
    older_rule,
    stored,
    uncounted_note,
)
from sparsync_lab.papers.gaussian_masks import masks_note
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, COUNTED, HELD, HELD_COUNTED, every_run, repeats
from sparsync_lab.papers.random_forms import trained_on
from sparsync_lab.papers.run import History, model_title
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.papers.vgg16_notes import change_tables, gap_note, precision_note, spread_note, vgg16_spread
from sparsync_lab.report import Figure, Table

SCHEDULE = (
    "P1 does not print its schedule. As in its authors' code, the learning rate grows over the first 5 of 120 epochs "
    "and is divided by 10 after 81; density is 0.001 from the first step on, as the text says (the code begins with "
    "1/64 and 0.004, for an epoch each). Weight decay is 0; in the authors' code it is 0.0001, of weights alone. "
    "What these two change, beyond/evidence measures, with weight decay of all parameters, biases too. LeNet-5's "
    "images are padded; the code resizes them to 32 x 32. The code's files ask for 80 epochs of LeNet-5 and for 141 of "
    "VGG-16, with another division at 122; P1's text has 120, as here. CIFAR-10 is cropped and flipped at random, as "
    "in that code."
)
BESIDE = "LeNet-5 on MNIST, which P1 trains but does not draw here, has the same schedule."
IMAGENET = (
    "P1's third model, ResNet-50 on ImageNet, is for those who have it: --only resnet50 with --data-dir at a folder "
    "that holds train/<class>/ and val/<class>/ trains it on 16 virtual workers of 32 pictures, 70 epochs, rate 0.2 "
    "divided by 10 after 30 and 60 (P1 prints no rate, and a batch of 128 with its times only)."
)
RANDOM = (
    "P1's text says that RandK-SGD cannot converge on ImageNet, and implies that it learns on CIFAR-10, if slowly. It "
    "gives RandK-SGD a residual (Eq. 2), as here; its authors' code has it with one (randomkec) and without (randomk), "
    "and P1 does not say which of them figure 1 shows. That code begins with densities that are four to sixteen times "
    "as high. What these two change, beyond/evidence measures {trained}. With a residual entries wait for a thousand "
    "steps on average, and the learning rate is dense SGD's; lower ones were not tried. Of what it sends, the density "
    "column counts what is not 0."
)


def convergence(
    context: RunContext, methods: Sequence[str], remarks: Sequence[str], again: Sequence[str] = ()
) -> Result:
    """Compare test accuracies of LeNet-5, ResNet-20 and VGG-16 with each method; of ResNet-50 if it is asked for.

    Args:
        remarks: on the methods.
        again: forms of Gaussian-k that were trained again to count: their counts are drawn where they are stored.
    """
    figures: list[Figure] = []
    tables: list[Table] = []
    histories: list[History] = []
    imagenet = any(word.startswith("resnet5") for word in context.only)
    names = ("lenet5", "resnet20", "vgg16", *(["resnet50"] if imagenet else []))
    asked = {model: [run for method in methods for run in repeats(context, model, method)] for model in names}
    if context.quick:
        asked = {model: [replace(run, **quick_changes(run)) for run in runs] for model, runs in asked.items()}
    # Those of all models in one go, so that several processes have enough to share.
    missing = train_missing(context, [run for runs in asked.values() for run in runs])[1]
    counted = {form: stored(context, form) for form in again}
    looks = looks_of([*methods, *again])
    drawn: dict[str, dict[str, History]] = {}
    several = () if context.quick or context.seed else methods  # beyond/evidence trains seeds that are not asked for
    for model, runs in asked.items():
        others = [run for method in several for run in every_run(context, model, method)]
        done, _ = train_missing(context.read_only(), [*runs, *others])
        counts = {form: own[model] for form, own in counted.items() if model in own}
        histories += [*done.values(), *counts.values()]
        if done:
            title = model_title(model)
            drawn[title] = done
            on = next(iter(done.values())).data["name"]
            twice = f" {COUNTED}: gaussiank trained again, drawn like it." if COUNTED in done else ""
            caption = f"{title}, data {on}; {spread_caption(done)}.{twice}"
            figures.append(by_epoch(f"{title}, test accuracy", done, caption, looks))
            tables.append(scores(f"{title}: test accuracy", done))
            figures += count_figures(title, {**done, **counts}, looks)
    result = base_result(context, histories, missing)
    seeds = f"{seeds_note(drawn)}{spread_note(context)}"
    notes = [
        *remarks,
        f"{SCHEDULE} {others_told(context, vgg16_spread(context))}",
        precision_note(context),
        f"{BESIDE} {seeds}",
        IMAGENET,
        *result.notes,
    ]
    return replace(result, tables=tables, figures=figures, notes=notes)


def seeds_note(drawn: Mapping[str, Mapping[str, History]]) -> str:
    """Return which trainings have several seeds.

    Args:
        drawn: by the title of their model, and label.
    """
    told = []
    for title, done in drawn.items():
        several: dict[int, list[str]] = {}
        for label, seeds in by_seed(done).items():
            several.setdefault(len(seeds), []).append(label)
        told += [
            f"{title} has {in_words(many)} of {'; '.join(labels)}." for many, labels in several.items() if many > 1
        ]
    rest = "All others have one seed" if told else "All have one seed"
    shown = ["Shown are mean and standard deviation, and the range of the seeds in curves."] if told else []
    return " ".join([*told, *shown, f"{rest}, and what differs by less than a point is no ranking."])


def figure_1(context: RunContext) -> Result:
    remarks = [*gap_note(context), RANDOM.format(trained=trained_on(context))]
    return convergence(context, ("dense", "topk", "randk"), remarks)


def figure_6(context: RunContext) -> Result:
    methods = ("dense", "topk", "gaussiank", HELD, AUTHORS, CARRIED, COUNTED)
    counted = [note for form in (HELD_COUNTED, CARRIED) for note in fallback_note(form, every_seed(context, form))]
    remarks = [*FORM_NOTES, masks_note(), *older_rule(context), *counted, *uncounted_note(context), *gap_note(context)]
    result = convergence(context, methods, remarks, [HELD_COUNTED])
    return replace(result, tables=[*result.tables, *change_tables(context)])
