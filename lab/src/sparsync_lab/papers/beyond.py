"""Beyond the papers: tuned dense training against sparse methods that send the same bytes in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sparsync_lab.papers import tables
from sparsync_lab.papers.curves import base_result
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.run import History, Run, file_of
from sparsync_lab.papers.run_queue import check_only, process_queue
from sparsync_lab.papers.sweep import BASE, SETTINGS, Setting, Stage
from sparsync_lab.report import Row, Table

QUICK_SETTINGS: Mapping[str, Setting] = {
    "resnet20": replace(SETTINGS["resnet20"], workers=2, batch=4, lengths=(3, 6), limit=32),
    "gpt": replace(SETTINGS["gpt"], workers=2, batch=2, lengths=(3,), limit=32),
}
QUICK_STAGES = (
    Stage("resnet20", 0, (0,), ("dense", BASE)),  # two workers have too few bytes for what the recipe sends dense
    Stage("resnet20", 1, (0,), ("dense", BASE)),
    Stage("gpt", 0, (0,), ("dense",)),
)
NOTES = (
    "Bytes are what one worker puts on the network in the whole training, counted step by step; of the messages, one "
    "of every unit is encoded every 100 steps and its true size compared with what was counted. The balanced recipe "
    "cuts that message into parts and sends sums of them: there every worker's messages of both rounds are encoded, as "
    "real processes do it, and compared; in earlier trainings the same sizes were counted without that. "
    "sparsync bench traffic holds the sizes, with the balanced recipe's own settings too, against the counters of a "
    "network interface. Every sparse row has the density at which it sends as much as TopK-SGD at 0.1 % (index and "
    "value of 32 bits each).",
    "Every row, dense too, is tuned alike: half, once and twice the same rate at the shortest length with the first "
    "seed, then a quarter or four times where the best stands at the edge, and if it stands there still, further out "
    "(the table of rates says how far); the best last score decides, and the longer trainings and other seeds take "
    "that rate; where it stands at the edge, longer ones are trained with the one beside it, too, and further where "
    "the best of several is the lowest or the highest of them (one that was made with several is shown with the best); "
    "where one of the seeds does not learn with it (not half the accuracy), it is the next best for all. "
    "The search is the table of rates. The scores that choose are those of the test set (PTB: of the validation set), "
    "for all rows alike, and the seed that chose is one of those shown. The row with momentum corrected and a density "
    "warm-up was itself found by trying some variants of ResNet-20's 1,400 steps with the first seed, which are not "
    "stored; a table shows what lies around it. Of dense only the rate was tuned.",
    "LSTM-AN4's middle rate is four times P1's: in earlier trainings, which are not asked for any more, lower ones "
    "were worse (docs/papers-provenance.md).",
    "All schedules: linear warm-up over 3 % (GPT 10 %) of the steps, then a cosine to 0; no weight decay but 0.01 in "
    "AdamW. Where gradients are clipped (GPT 1, LSTM-PTB 0.25, LSTM-AN4 400), each worker clips its own: where "
    "it chooses layer by layer or sends tensors dense (DGC, the default recipe, scope layer) that is every layer's or "
    "tensor's norm, which cuts less off than dense's clipping of the whole.",
    "GaussianK-SGD has its count held near k (refine=True): as printed, its messages need room for 8 k. DGC has no "
    "warm-up of the density, and nothing travels dense; ablations add both. The warm-up (FrontLoaded) begins with four "
    "times the density, where momentum is corrected with eight times, and ends after a tenth of the training, at less "
    "than without: the bytes are the same. LSTM-PTB has no momentum and AdamW none of SGD's kind, so that there is "
    "nothing to correct there; the default recipe lowers AdamW's betas to 0.5 and 0.99.",
    "Ablations change one thing of the default recipe with nothing dense (momentum moved, signs, all-gather, global "
    "scope, constant density, rate outside the residual) or of the balanced one (sums in parts, of twice as many "
    "entries as each worker sends; momentum of 0.5 before the residual) or of DGC or, in a table of their own, of the "
    "row with momentum corrected and a density warm-up. Where that is momentum, which moves "
    "the best rate, the rate is searched for as for the rows; the others, and those around that row, take the rate of "
    "what they change, or of several that they were made with the best.",
    "VGG-16 computes in bfloat16 where torch's autocast takes that to be safe, dense and sparse alike; weights, "
    "gradients and all that is sent are fp32. The other models compute in fp32, on a GPU with convolutions (and "
    "products, see below) of TF32. Differences are over the seeds that both have.",
)

ORDER = "The order of the trainings"


class Sweep:
    """An item's trainings: those that are stored, and those that are made now.

    Args:
        compared: what is trained, as ``LearningRateSearch`` takes it; at equal bytes if it is left out.
    """

    def __init__(self, context: RunContext, **compared: Any) -> None:
        self.context = context
        self.done: dict[str, History] = {}
        if context.quick and not compared:
            compared = {"settings": QUICK_SETTINGS, "stages": QUICK_STAGES}
        self.search = LearningRateSearch(self.get, context.seed, **compared)

    def get(self, run: Run) -> History | None:
        return self.done.get(run.made(self.context).name)

    def train_missing(self) -> None:
        """Train stage by stage, as far as time and ``--only`` allow; read what is stored."""
        check_only(self.context, (run.made(self.context) for run in self.search.possible()))
        process_queue(self.context, self.ready, self.done)

    def ready(self) -> Iterator[Run]:
        """Yield what can be trained by now, done or not: a stage is asked when those before it have been gone through.
        Then what was trained with other rates of the search, when they were the best, and is stored."""
        for stage in self.search.stages:
            yield from [run.made(self.context) for run in self.search.runs(stage)[0]]
        for stage in self.search.stages:
            for run in self.search.others(stage):
                made = run.made(self.context)
                if file_of(self.context, made).is_file():
                    yield made

    def histories(self) -> list[History]:
        """Return all finished trainings in the order of the stages."""
        names = dict.fromkeys(run.name for run in self.ready())
        return [self.done[name] for name in names if name in self.done]

    def left(self, stage: Stage) -> tuple[int, list[Run]]:
        """Return how many of a stage's trainings are done, and those that are not."""
        ready, waiting = self.search.runs(stage)
        missing = [run for run in ready if self.get(run) is None]
        return len(ready) - len(missing), missing + waiting

    def result(self) -> Result:
        """Return what is common to all sweeps: the trainings, and the stages that are not done."""
        missing = []
        for number, stage in enumerate(self.search.stages, 1):
            done, left = self.left(stage)
            if left:
                what = name_of(self.search, stage).partition(": ")[0]  # which methods, the table of the order says
                missing.append(f"{number}. {what} ({len(left)} of {done + len(left)})")
        return base_result(self.context, self.histories(), missing)


def accuracy(context: RunContext) -> Result:
    """Compare test scores at equal bytes, from all that is trained so far."""
    sweep = Sweep(context)
    sweep.train_missing()
    search, result = sweep.search, sweep.result()
    shown = [tables.summary_table(search), *tables.all_tables(search), order_of(sweep)]
    figures = tables.figures(search)
    rows = tables.columns(search)
    return replace(result, tables=shown, figures=figures, rows=rows, notes=[*NOTES, *result.notes])


def name_of(search: LearningRateSearch, stage: Stage) -> str:
    setting = search.settings[stage.model]
    seeds = " and ".join(str(seed + search.seed) for seed in stage.seeds)
    what = "search for the rate" if stage.search and not setting.like else f"seed {seeds}"
    workers = f", {setting.workers} workers" if setting.like else ""
    methods = tables.method_names(search, stage.methods)
    return f"{setting.title}{workers}, {setting.lengths[stage.length]:,} steps, {what}: {methods}"


def order_of(sweep: Sweep) -> Table:
    """Return the stages in the order in which they are trained, as a table."""
    rows, total = [], 0.0
    for number, stage in enumerate(sweep.search.stages, 1):
        done, left = sweep.left(stage)
        every = [run.seconds / 60 for runs in sweep.search.runs(stage) for run in runs]
        minutes = sum(run.seconds for run in left) / 60
        total += minutes
        setting = sweep.search.settings[stage.model]
        word = f"{setting.model}-{setting.words(stage.length).replace(' ', '-')}"
        cells = [str(number), name_of(sweep.search, stage), word, f"{done} of {done + len(left)}"]
        missing = [run.label.removeprefix(f"{setting.words(stage.length)} ") for run in left]
        cells += [f"{sum(every) / len(every):.1f}", f"{minutes:.1f}", "; ".join(missing)]
        rows.append(Row(cells))
    notes = [
        "Minutes are of one training at a time. A search has one more training where its best rate stands at the edge, "
        "and so has a longer one where the best of several rates is the lowest or the highest of them."
    ]
    headings = [
        "",
        f"trainings, {total:.0f} minutes left in all",
        "--only",
        "done",
        "minutes each",
        "minutes left",
        "missing",
    ]
    return Table(ORDER, headings, rows, notes)


def order(context: RunContext, sweep_of: Callable[[RunContext], Sweep] = Sweep) -> Table:
    """Return what has been trained of a sweep and what comes next; train nothing."""
    sweep = sweep_of(replace(context.read_only(), resume=True))
    sweep.train_missing()
    return order_of(sweep)


ITEMS = (
    Item(
        "beyond/accuracy",
        "accuracy at equal bytes",
        "Dense SGD, tuned, against TopK-SGD, GaussianK-SGD, DGC and the library's recipes, which all send the "
        "same bytes and are tuned alike.",
        accuracy,
        ("CIFAR-10", "MNIST", "PTB", "AN4", "a GPU"),
        180,
        order=order,
        trains=True,
    ),
)
