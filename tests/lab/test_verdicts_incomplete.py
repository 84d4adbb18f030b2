"""Verdicts where trainings are missing: they are left open or partly, or stay, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from sparsync_lab.papers import ITEMS, RunContext, run_queue
from sparsync_lab.papers.claim import MISSING, PARTLY, UNDECIDED, Verdict
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.run import History, Run
from sparsync_lab.papers.store import results_of
from sparsync_lab.papers.verdicts import verdicts

OUTPUT = Path(__file__).parent.parent.parent / "results" / "papers"
REMADE = ("p1/fig1", "p1/fig2", "p1/fig5", "p1/fig6", "p1/fig7", "p1/fig8", "p2/table1", "p3/convergence",
          "p3/density", "beyond/evidence")  # fmt: skip


@pytest.fixture(scope="module")
def remade() -> Iterator[Callable[[Callable[[Run], bool]], Mapping[str, Result]]]:
    """Make the items from the stored trainings without some of them; the others are as they are stored."""
    stored = {key: found[0].result for key, item in ITEMS.items() if (found := results_of(item, OUTPUT))}
    context = RunContext(output=OUTPUT).read_only()
    read, known, gone = run_queue.read, dict[Path, History](), [lambda run: False]

    def make(missing: Callable[[Run], bool]) -> Mapping[str, Result]:
        gone[0] = missing
        return {**stored, **{key: ITEMS[key].run(context) for key in REMADE}}

    with pytest.MonkeyPatch.context() as patch:
        file_of = run_queue.file_of
        patch.setattr(run_queue, "file_of", lambda c, run: Path("gone") if gone[0](run) else file_of(c, run))
        patch.setattr(run_queue, "read", lambda path, run: known.get(path) or known.setdefault(path, read(path, run)))
        yield make


def words(results: Mapping[str, Result]) -> dict[tuple[str, str], Verdict]:
    return {(one.claim.item, one.claim.text): one for one in verdicts(results)}


GROUPS: Mapping[str, Callable[[Run], bool]] = {
    **{f"all of {model}": lambda run, model=model: run.model == model  # type: ignore[misc]
       for model in ("lenet5", "resnet20", "vgg16", "resnet18", "lstm-ptb", "fnn3")},
    **{f"dense {model}": lambda run, model=model: run.model == model and run.method == "dense"  # type: ignore[misc]
       for model in ("resnet20", "vgg16", "resnet18", "lenet5")},
    **{f"topk {model}": lambda run, model=model: run.model == model and run.method == "topk"  # type: ignore[misc]
       for model in ("resnet20", "vgg16", "resnet18")},
    "gaussian": lambda run: run.method == "gaussian",
    "randk": lambda run: run.method == "random+allgather",
    "gTop-k": lambda run: "gtopk" in run.method,
    "other seeds": lambda run: run.seed > 0,
    "the first seed": lambda run: run.seed == 0 and run.model == "resnet20",
    "everything": lambda run: True,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(remade: Callable[..., Mapping[str, Result]]) -> dict[tuple[str, str], Verdict]:
    return words(remade(lambda run: False))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_missing_makes_no_verdict_firmer(
    group: str, remade: Callable[..., Mapping[str, Result]], whole: dict[tuple[str, str], Verdict]
) -> None:
    less = words(remade(GROUPS[group]))
    assert less.keys() == whole.keys()
    open_or_partly = {MISSING, UNDECIDED, PARTLY}
    assert not [
        (key, one.word, one.here) for key, one in less.items() if one.word not in open_or_partly | {whole[key].word}
    ]
