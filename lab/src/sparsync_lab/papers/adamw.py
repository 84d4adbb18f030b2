"""Beyond the papers: AdamW with preconditioned feedback, against dense and against what others published."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sparsync_lab.papers import adamw_tables, beyond
from sparsync_lab.papers.adamw_sweep import ABLATIONS, QUICK, ROWS, SETTINGS, STAGES
from sparsync_lab.papers.beyond import Sweep, order_of
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.tables import columns

NOTES = (
    "A budget is the share of what a worker would put on the network with dense fp32 gradients summed in a ring. "
    "Everything is counted: entries, sketches of the second moment, tensors that travel dense.",
    "Every row, dense too, is tuned alike: 0.5, 0.7, 1, 1.4 and 2 times the same rate (GPT-2 small: 0.5, 1 and 2) at "
    "the shortest length with 16 workers and the first seed, and further while the best stands at the edge; the last "
    "score decides (PTB: of the validation set; CIFAR-10: of the test set), and the seed that chose is one of those "
    "shown. Other seeds and other numbers of workers, with the same 64 sequences a step in all, take that rate. "
    "Ablations take the rate of what they change.",
    "2,400 steps are 21 epochs of PTB, in which this GPT overfits (docs/papers-provenance.md). So all rows of that "
    "length are trained with a dropout of 0.2 (of the embedding and of what residual branches add), with 0.5, 1 and 2 "
    "times the same rate tried at that length.",
    "Ablations of the second moment (v), the limit, the floor and the residual's size are made by virtual workers, who "
    "know every gradient: exact and own second moments are not sent, and the bytes are those of the unchanged row. Own "
    "v is that of a worker's own gradient, which it clips by itself. One step old, updates are divided by the second "
    "moment of the step before; norms for clipping are this step's. Tensors that travel dense have plain AdamW in all "
    "of them.",
    "All schedules: linear warm-up over 10 % (ResNet-20 and VGG-16: 3 %) of the steps, then a cosine to 0; AdamW's "
    "weight decay is 0.01, decoupled. Gradients are clipped at norm 1 (not ResNet-20's and VGG-16's): dense, gradient "
    "feedback, DeMo and SparseLoCo clip each worker's own, preconditioned feedback the mean gradient's norm as its "
    "sketches give it.",
    "The text is 64 streams, read on window by window, which all epochs cut alike. Random windows are from other "
    "places in every step; 0.7, 1 and 1.4 times the same rate are tried there. Rows of dense with another beta2 than "
    "0.999 are tuned like all others; that of preconditioned feedback rises as 1 - t^-0.6, as ablations show.",
    "dense, row x column v is the control: dense AdamW with the second moment that preconditioned feedback has (row x "
    "column of the mean gradient, with the same floor, exact for tensors of one dimension), but without sparsity.",
    "Gradient feedback + AdamW: the same entries' codecs and budget, with AdamW behind the residual, its betas lowered "
    "to 0.5 and 0.99.",
    "DeMo and SparseLoCo are written from their papers. DeMo: momentum of 0.999, cosine transform of 64 x 64 blocks, "
    "sign step; coefficients as bfloat16. SparseLoCo: error decayed by 0.95, 64 x 64 blocks, two bits a value and two "
    "magnitudes a block, common weights stepped with rate 1 without momentum; between exchanges scores are those of "
    "the last common weights. Indices of both are counted as ours are, Elias-Fano coded: less than their papers "
    "count; as many entries of every block are sent as the budget allows, at least one.",
    "SGD (ResNet-20 and VGG-16): momentum 0.9, no weight decay, half, once and twice the same rate and further at the "
    "edge; its default is gradient feedback with momentum of 0.5 before the residual, and preconditioned SGD is "
    "precondition=True. VGG-16 computes in bfloat16 where autocast takes that to be safe.",
    "GPT-2 small has its 50,257 words, of which PTB has 10,000.",
)


def sweep_of(context: RunContext) -> Sweep:
    """Return the trainings: the full ones, or tiny ones."""
    compared = {"settings": SETTINGS, "stages": STAGES, **(QUICK if context.quick else {})}
    return Sweep(context, rows=ROWS, ablations=ABLATIONS, equal_bytes=False, **compared)


def adamw(context: RunContext) -> Result:
    """Compare scores at equal bytes, from all that is trained so far."""
    sweep = sweep_of(context)
    sweep.train_missing()
    search, result = sweep.search, sweep.result()
    tables = [*adamw_tables.all_tables(search), order_of(sweep)]
    figures, rows = adamw_tables.figures(search), columns(search)
    return replace(result, tables=tables, figures=figures, rows=rows, notes=[*NOTES, *result.notes])


ITEMS = (
    Item(
        "beyond/adamw",
        "AdamW at a fraction of the traffic",
        "Dense AdamW, tuned, against preconditioned feedback at several budgets, gradient feedback, DeMo and "
        "SparseLoCo, tuned alike.",
        adamw,
        ("PTB", "CIFAR-10", "a GPU"),
        60,
        order=partial(beyond.order, sweep_of=sweep_of),
        trains=True,
    ),
)
