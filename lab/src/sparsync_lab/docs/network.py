"""Time on slow links: what the network lab measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from sparsync_lab.docs.sources import Line, Sources, table
from sparsync_lab.network.train import NEAR
from sparsync_lab.papers.run import model_title

TRAIN, STEPS = "lab-train.csv", "lab-collectives.csv"
DENSE = "dense"
COMMAND = "sparsync lab train"


class Setting:
    """Trainings of one model over minutes, on links of several rates.

    Args:
        lines: of the file, of one model and number of workers.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.first, self.lines = lines[0], lines
        self.rates = list(dict.fromkeys(line["rate_mbit"] for line in lines))
        self.labels = list(dict.fromkeys(line["label"] for line in lines))
        self.sign = 1 if self.first["score"] == "accuracy" else -1
        best = max(self.sign * float(line["value"]) for line in lines if line["label"] == DENSE)
        self.target = self.sign * best * (1 - self.sign * NEAR)

    @property
    def title(self) -> str:
        compute = float(self.first["compute_ms"])
        return f"{model_title(self.first['model'])}, {self.first['workers']} workers, {compute:g} ms of compute a step"

    @property
    def goal(self) -> str:
        shown = f"{100 * self.target:.1f} %" if self.sign > 0 else f"{self.target:.1f}"
        return f"{self.first['score']} of {shown}"

    def minutes_to_target(self, label: str, rate: str) -> float | None:
        """Return the median over the seeds of the minutes until the target; none, if a seed never reaches it."""
        own = [line for line in self.lines if (line["label"], line["rate_mbit"]) == (label, rate)]
        found = []
        for _, rows in groupby(own, key=lambda line: line["training"]):
            reached = (row for row in rows if self.sign * float(row["value"]) >= self.sign * self.target)
            first = next(reached, None)
            if first is None:
                return None
            found.append(float(first["minutes"]))
        return median(found)

    def row(self, label: str) -> list[str]:
        cells = []
        for rate in self.rates:
            dense, own = self.minutes_to_target(DENSE, rate), self.minutes_to_target(label, rate)
            factor = f" ({dense / own:.1f} ×)" if own and dense and label != DENSE else ""
            cells.append("–" if own is None else f"{_minutes(own)}{factor}")
        return [label, *cells]


def settings(sources: Sources) -> list[Setting]:
    """Return what was trained, model by model."""
    lines = sorted(sources.lines(TRAIN), key=_kind)
    return [Setting(list(own)) for _, own in groupby(lines, key=_kind)]


def minutes(sources: Sources) -> str:
    """Return the minutes until dense's quality, on every link."""
    shown = []
    for own in settings(sources):
        headings = [f"minutes to a {own.goal}", *(rate_text(rate) for rate in own.rates)]
        shown.append(f"**{own.title}**\n\n{table(headings, map(own.row, own.labels))}")
    made = sources.made(TRAIN, sources.lines(TRAIN)[0], COMMAND)
    return "\n\n".join([*shown, f"{made} {ABOUT}"])


ABOUT = (
    "Scores are of stored trainings on virtual workers; seconds of a step were measured on real processes, whose links "
    "were held to these rates, with compute waited for. All workers share this machine's cores, also for selecting "
    "entries, and bf16 has the scores of fp32."
)


def steps(sources: Sources) -> str:
    """Return how long a step takes with every method, on every link."""
    lines = sources.lines(STEPS)
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
    made = sources.made(STEPS, lines[0], "sparsync lab collectives")
    shown_table = table(["entries, workers, links, compute", *(f"`{method}`" for method in methods)], rows)
    return f"{shown_table}\n\nMilliseconds a step, backward and exchange; the fastest in bold. {made}"


def _kind(line: Line) -> tuple[str, int]:
    return line["model"], int(line["workers"])


def _entries(model: str) -> str:
    return f"{int(model):,}" if model.isdigit() else model


def rate_text(mbit: str) -> str:
    """Return a rate as people say it."""
    value = float(mbit)
    return f"{value / 1000:g} Gbit/s" if value >= 1000 else f"{value:g} Mbit/s"


def _minutes(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
