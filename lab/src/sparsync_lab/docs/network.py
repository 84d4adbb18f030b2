"""Time on slow links: what the network lab measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median, stdev

from sparsync_lab.docs.sources import Line, Sources, table
from sparsync_lab.network.train import method_name
from sparsync_lab.papers.run import model_title

TRAIN = ("lab-train.csv", "lab-train-vgg16.csv")
STEPS = ("lab-collectives.csv", "lab-collectives-plain.csv")
AUTO = ("lab-auto.csv", "lab-auto-plain.csv", "lab-auto-adamw.csv")
WITHOUT_NUMBA = ("lab-collectives-plain.csv", "lab-auto-plain.csv", "lab-auto-adamw.csv")  # on a machine that has none
PREDICT, REAL = "lab-predict.csv", "lab-real.csv"
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
DENSE = "dense"
COMMAND = "sparsync lab train"
ABOUT = (
    "Scores are of stored trainings on virtual workers; seconds of a step were measured on real processes, whose links "
    "were held to these rates, with compute waited for. All workers share this machine's cores, also for selecting "
    "entries: on faster links that is what takes the time. bf16 has the scores of fp32."
)


class NetworkSetting:
    """Trainings of one model over minutes, on links of several rates.

    Args:
        lines: of the file, of one model and number of workers.

    Attributes:
        target: the score that every dense training reaches.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.first, self.lines = lines[0], lines
        self.rates = list(dict.fromkeys(line["rate_mbit"] for line in lines))
        self.labels = list(dict.fromkeys(map(_method, lines)))
        self.sign = 1 if self.first["score"] == "accuracy" else -1
        dense = [line for line in lines if _method(line) == DENSE]
        best = [max(self.sign * float(line["value"]) for line in own) for own in _trainings(dense)]
        self.target = self.sign * min(best)

    @property
    def title(self) -> str:
        compute = float(self.first["compute_ms"])
        return f"{model_title(self.first['model'])}, {self.first['workers']} workers, {compute:g} ms of compute a step"

    @property
    def goal(self) -> str:
        """The score to reach, in words."""
        shown = f"{100 * self.target:.1f} %" if self.sign > 0 else f"{self.target:.1f}"
        return f"{'an' if self.first['score'] == 'accuracy' else 'a'} {self.first['score']} of {shown}"

    def of(self, label: str, rate: str) -> list[list[Line]]:
        """Return the lines of each training of a method on links of one rate."""
        own = [line for line in self.lines if (_method(line), line["rate_mbit"]) == (label, rate)]
        return _trainings(own)

    def minutes_to_target(self, label: str, rate: str) -> float | None:
        """Return the median over the seeds of the minutes until the target; none, if a seed never reaches it."""
        found = []
        for rows in self.of(label, rate):
            reached = (row for row in rows if self.sign * float(row["value"]) >= self.sign * self.target)
            first = next(reached, None)
            if first is None:
                return None
            found.append(float(first["minutes"]))
        return median(found)

    def row(self, label: str) -> list[str]:
        """Return a method's last scores, and its minutes on every link."""
        trainings, cells = self.of(label, self.rates[0]), []
        best = [self.sign * max(self.sign * float(line["value"]) for line in own) for own in trainings]
        scale = 100 if self.sign > 0 else 1
        for rate in self.rates:
            dense, own = self.minutes_to_target(DENSE, rate), self.minutes_to_target(label, rate)
            factor = f" ({dense / own:.1f} ×)" if own and dense and label != DENSE else ""
            cells.append("–" if own is None else f"{minutes_text(own)}{factor}")
        return [label, f"{scale * mean(best):.1f} ± {scale * stdev(best):.1f}", *cells]


def settings(sources: Sources, name: str = TRAIN[0]) -> list[NetworkSetting]:
    """Return what was trained, model by model."""
    lines = sorted(sources.lines(name), key=_kind)
    return [NetworkSetting(list(own)) for _, own in groupby(lines, key=_kind)]


def gains(sources: Sources) -> str:
    """Return the minutes that are saved on the slowest link, and lost on the fastest, in a sentence."""
    own = settings(sources)[0]
    ours = [label for label in own.labels if label != "auto"][-1]
    slow, fast = own.rates[0], own.rates[-1]

    def times(rate: str) -> list[float]:
        found = [own.minutes_to_target(label, rate) for label in (DENSE, own.labels[1], ours)]
        return [time for time in found if time is not None]

    (dense, half, sparse), (dense_fast, half_fast, sparse_fast) = times(slow), times(fast)
    return (
        f"**{own.title}, on links of {rate_text(slow)}: {own.goal}, which dense training ends with, after "
        f"{minutes_text(sparse)} minutes instead of {minutes_text(dense)}** ({minutes_text(half)} in bf16), with AdamW "
        f"and a 40th of the bytes. On {rate_text(fast)} it takes {minutes_text(sparse_fast)} minutes instead of "
        f"{minutes_text(dense_fast)} (bf16: {minutes_text(half_fast)}), as four workers share two cores there: "
        '`attach(model, "auto", optimizer=optimizer)` measures, and stays dense where that is faster. '
        f"{_really(sources)}"
    )


def _really(sources: Sources) -> str:
    """Return what real steps took with every method, in a sentence."""
    lines = sources.lines(REAL)
    first = lines[0]
    own = [line for line in lines if line["rate_mbit"] == first["rate_mbit"]]
    took = {
        m: sum(float(line["step_ms"]) for line in own if line["method"] == m) / 1e3 for m in (DENSE, "bf16", "default")
    }
    return (
        f"Checked by {own[-1]['step']} real steps of that GPT, {first['workers']} processes that share a GPU, links of "
        f"{rate_text(first['rate_mbit'])}: {took['default']:.1f} seconds instead of {took[DENSE]:.1f} "
        f"(bf16: {took['bf16']:.1f})."
    )


def minutes(sources: Sources) -> str:
    """Return the minutes until dense's quality, on every link."""
    shown = []
    for name in TRAIN:
        for own in settings(sources, name):
            headings = ["minutes to " + own.goal, "ends with", *map(rate_text, own.rates)]
            shown.append(f"**{own.title}**\n\n{table(headings, map(own.row, own.labels))}")
        shown.append(sources.made(name, sources.lines(name)[0], COMMAND))
    return "\n\n".join([*shown, ABOUT])


def steps(sources: Sources) -> str:
    """Return how long a step takes with every method, on every link, machine by machine."""
    return "\n\n".join(_steps(sources, name) for name in STEPS)


def _steps(sources: Sources, name: str) -> str:
    lines = sources.lines(name)
    cells = dict[tuple[str, ...], dict[str, float]]()
    for line in lines:
        place = tuple(line[name] for name in ("model", "workers", "rate_mbit", "compute_ms"))
        cells.setdefault(place, {})[line["method"]] = float(line["step_p50_ms"])
    methods = list(dict.fromkeys(line["method"] for line in lines))
    rows = []
    for (model, workers, rate, compute), times in cells.items():
        shown = [f"{times[method]:.0f}" if method in times else "–" for method in methods]
        fastest = methods.index(min(times, key=lambda method: times[method]))
        shown[fastest] = f"**{shown[fastest]}**"
        rows.append([f"{_entries(model)}, {workers} workers, {rate_text(rate)}, {float(compute):g} ms", *shown])
    made = sources.made(name, lines[0], "sparsync lab collectives")
    shown_table = table(["entries, workers, links, compute", *(f"`{method}`" for method in methods)], rows)
    about = "Milliseconds a step, backward and exchange; the fastest in bold."
    return f"{_machine(name, lines[0])}\n\n{shown_table}\n\n{about} {made}"


def _machine(name: str, line: Line) -> str:
    """Return what decides how fast messages are made and read."""
    return f"**{line['cpus']} cores, {'without' if name in WITHOUT_NUMBA else 'with'} numba.**"


def _method(line: Line) -> str:
    return method_name(line["label"])


def _trainings(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each training."""
    names = dict.fromkeys(line["training"] for line in lines)
    return [[line for line in lines if line["training"] == name] for name in names]


def never_slower(sources: Sources) -> str:
    """Return how `auto` did beside the better of dense bf16 and the best sparse method, machine by machine."""
    return "\n\n".join(_never_slower(sources, name) for name in AUTO)


def _never_slower(sources: Sources, name: str) -> str:
    lines = sources.lines(name)
    times = {(*_cell(line), line["method"]): float(line["step_p50_ms"]) for line in lines}
    rows, held, within = [], 0, 0
    own = [line for line in lines if line["method"] == "auto"]
    for line in own:
        ratio, holds = float(line["ratio"]), line["holds"] == "yes"
        held, within = held + holds, within + (ratio <= 1.02)
        cell, rival = _cell(line), line["rival"]
        faster = times[*cell, "bf16"] / float(line["step_p50_ms"])
        place = f"{line['model']}, {line['workers']} workers, {rate_text(line['rate_mbit'])}"
        took, outcome = f"{float(line['step_p50_ms']):.0f}", f"{ratio:.3f}{'' if holds else ', slower'}"
        spread = f"{float(line['equal_runs']):.3f}"
        rows.append([place, f"{times[*cell, 'bf16']:.0f}", took, f"{faster:.2f} ×", f"`{rival}`", outcome, spread])
    headings = [
        "cell",
        "dense bf16, ms",
        "`auto`, ms",
        "faster",
        "rival",
        "of the rival's time",
        "equal runs differ by",
    ]
    said = (
        f"In {held} of {len(own)} cells a step of `auto` takes at most 1.02 times that of its rival, the better of "
        "dense bf16 and the best sparse method, or is no further from it than equal runs are from each other "
        f"({within} are within 1.02)."
    )
    made = f"{sources.made(name, own[0], 'sparsync lab auto')} With {OPTIMIZERS[own[0]['optimizer']]}."
    return f"{_machine(name, own[0])} {said}\n\n{table(headings, rows)}\n\n{made}"


def predictions(sources: Sources) -> str:
    """Return the planner's predictions beside measured steps."""
    if not sources.has(PREDICT):
        return "No run is stored yet."
    lines = sources.lines(PREDICT)
    methods = list(dict.fromkeys(line["method"] for line in lines))
    cells = dict[tuple[str, str, str], dict[str, str]]()
    for line in lines:
        shown = f"{float(line['predicted_ms']):.0f} ({float(line['step_p50_ms']):.0f})"
        cells.setdefault(_cell(line), {})[line["method"]] = shown if line["right"] == "yes" else f"{shown} ✗"
    rows = [
        [f"{model}, {workers} workers, {rate_text(rate)}", *(own.get(method, "–") for method in methods)]
        for (model, workers, rate), own in cells.items()
    ]
    errors = [abs(float(line["error"])) for line in lines]
    said = (
        f"{sum(line['right'] == 'yes' for line in lines)} of {len(lines)} predictions are within 15 % of the measured "
        f"step; the median error is {100 * median(errors):.1f} %, the largest {100 * max(errors):.1f} %."
    )
    compute = f"{float(lines[0]['compute_ms']):g} ms of compute waited for"
    shown = table([f"predicted (measured) ms; {compute}", *(f"`{method}`" for method in methods)], rows)
    return f"{said}\n\n{shown}\n\n{sources.made(PREDICT, lines[0], 'sparsync lab predict')}"


def real_training(sources: Sources) -> str:
    """Return what a real training took, and what emulated steps said."""
    if not sources.has(REAL):
        return "No run is stored yet."
    lines, rows = sources.lines(REAL), []
    for (rate, method), own in groupby(lines, key=lambda line: (line["rate_mbit"], line["method"])):
        steps = list(own)
        took = [float(line["step_ms"]) for line in steps]
        loss = mean(float(line["loss"]) for line in steps[-max(1, len(steps) // 10) :])
        emulated = f"{float(steps[0]['emulated_ms']):.0f}" if steps[0]["emulated_ms"] else "–"
        cells = [f"{median(took[len(took) // 2 :]):.0f}", emulated, f"{sum(took) / 1e3:.1f}", f"{loss:.3f}"]
        rows.append([f"{rate_text(rate)}, `{method}`", *cells])
    first = lines[0]
    shown = table(["links, method", "step, ms", "emulated, ms", f"{lines[-1]['step']} steps, s", "loss"], rows)
    about = (
        f"{model_title(first['model'])}, {first['workers']} workers, AdamW, {first['compute']}: "
        f"{float(first['compute_ms']):.0f} ms a step without exchange. Emulated steps choose entries on the CPU, and "
        "leave out the optimizer's step."
    )
    return f"{shown}\n\n{about} {sources.made(REAL, first, 'sparsync lab real')}"


def _cell(line: Line) -> tuple[str, str, str]:
    return line["model"], line["workers"], line["rate_mbit"]


def _kind(line: Line) -> tuple[str, int]:
    return line["model"], int(line["workers"])


def _entries(model: str) -> str:
    return f"{int(model):,}" if model.isdigit() else model


def rate_text(mbit: str) -> str:
    """Return a rate as people say it."""
    value = float(mbit)
    return f"{value / 1000:g} Gbit/s" if value >= 1000 else f"{value:g} Mbit/s"


def minutes_text(value: float) -> str:
    """Return minutes with as many digits as matter."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
