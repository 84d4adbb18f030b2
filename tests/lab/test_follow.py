"""How well ThresholdK keeps to k: what ``bench follow`` records, and its command."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from sparsync_lab.bench.follow import DROP, FollowBench, FollowStep, follow, summarize_steps
from sparsync_lab.bench.workloads import ImageWorkload, TextWorkload, make_optimizer
from sparsync_lab.cli.app import run
from sparsync_lab.data import Images, streams
from sparsync_lab.data.mnist import MNIST
from sparsync_lab.models import CATALOGUE, GPT, LSTMPTB, build
from tests.lab.real import FOLDER, needs


def stripes(n: int = 256) -> Images:
    """Images of ten classes that a network can tell apart."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 10
    x = torch.randn(n, 1, 28, 28, generator=rng)
    x[torch.arange(n), 0, 2 * y + 3] += 4
    return Images(x, y, x, y, 10)


def lesson_of(batch: int = 32) -> ImageWorkload:
    torch.manual_seed(0)
    return ImageWorkload(build("lenet5"), stripes(), batch, seed=0)


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_a_training_is_followed() -> None:
    seen: list[int] = []
    steps = follow(FollowBench("lenet5", 40, 0.01), lesson_of(), seen.append)
    assert [step.step for step in steps] == list(range(1, 41))
    assert len(seen) == 40
    assert {step.k for step in steps} == {617}
    assert all(0 < step.count <= step.k for step in steps)
    assert all(step.candidates >= step.count for step in steps)
    assert all(0 < step.energy <= 1 + 1e-9 for step in steps)
    assert all(step.energy < 1 - 1e-9 for step in steps if step.count < step.k)
    assert [step.rate for step in steps] == pytest.approx(
        [0.001 * min(10, i) for i in range(1, 21)] + [0.01 / DROP] * 20
    )
    assert steps[-1].loss < steps[0].loss


def test_dense_training_is_plain_sgd() -> None:
    dense = follow(FollowBench("lenet5", 21, 0.01, feedback=False), lesson_of())
    plain = lesson_of()
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.01, momentum=0.9)
    for step in dense:
        optimizer.param_groups[0]["lr"] = step.rate
        optimizer.zero_grad()
        loss = plain.loss()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(step.loss, rel=1e-5)


def test_a_density_of_one_sends_all() -> None:
    steps = follow(FollowBench("lenet5", 21, 1.0), lesson_of())
    assert all(step.k == 61_706 for step in steps)
    assert all(step.energy == pytest.approx(1) for step in steps)


def test_a_training_that_diverges_says_so() -> None:
    with pytest.raises(ValueError, match=r"the training of LeNet-5 diverged at step \d+; try a rate below 1e\+06"):
        follow(FollowBench("lenet5", 40, 0.1, rate=1e6), lesson_of())


def test_a_summary_leaves_the_first_steps_out() -> None:
    def step(number: int, count: int, energy: float) -> FollowStep:
        return FollowStep(number, 1.0, 0.1, 100, count, 200, energy)

    first = [step(i, 5, 0.1) for i in range(1, 21)]
    steps = [*first, *(step(i, 90, 0.992) for i in range(21, 220)), step(220, 89, 0.5)]
    found = summarize_steps(steps)
    assert found.steps == 200
    assert found.within == pytest.approx(199 / 200)
    assert (found.fewest, found.most, found.energy, found.least_energy) == (0.89, 0.9, 0.992, 0.5)
    assert found.enough == pytest.approx(199 / 200)
    assert found.mean_energy == pytest.approx((199 * 0.992 + 0.5) / 200)
    assert found.met
    assert not summarize_steps([*steps, step(221, 50, 1.0), step(222, 50, 1.0)]).met
    assert not summarize_steps([*steps, step(221, 100, 0.98), step(222, 100, 0.98)]).met


# ---- lessons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [LSTMPTB(30, 16, dropout=0.0), GPT(30, 1, 16, 2, 8)], ids=["lstm", "gpt"])
def test_text_goes_on_from_window_to_window(model: LSTMPTB | GPT) -> None:
    text = streams(torch.randint(30, (100,), generator=torch.Generator().manual_seed(1)), 4)
    workload = TextWorkload(model, text, 8)
    losses = [workload.loss().item() for _ in range(4)]
    scores = (
        model(text[:, :-1])[0]
        if isinstance(model, LSTMPTB)
        else torch.cat([model(text[:, i : i + 8]) for i in (0, 8, 16)], 1)
    )
    each = torch.nn.functional.cross_entropy(scores[:, :24].flatten(0, 1), text[:, 1:25].flatten(), reduction="none")
    expected = each.view(4, 24).split(8, 1)
    assert losses[:3] == pytest.approx([part.mean().item() for part in expected], rel=1e-4)
    assert losses[3] == pytest.approx(losses[0], rel=1e-5)  # from the start again, with a fresh state


def test_optimizers_are_the_published_ones() -> None:
    model = GPT(30, 1, 16, 2, 8)
    assert isinstance(make_optimizer("gpt", model, 0.001), torch.optim.AdamW)
    for name, momentum in (("lenet5", 0.9), ("resnet20", 0.9), ("lstm-ptb", 0.0)):
        made = make_optimizer(name, model, CATALOGUE[name].rate)
        assert isinstance(made, torch.optim.SGD)
        assert made.param_groups[0]["momentum"] == momentum


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "vgg16"], "model must be one of lenet5, resnet20, lstm-ptb, gpt, got 'vgg16'"),
        (["--steps", "20"], "steps must be above 20, the steps that are not judged, got 20"),
        (["--density", "0"], "density must be above 0 and at most 1, got 0"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--rate", "-1"], "rate must be above 0, got -1"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "follow", "--device", "cpu", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@needs("mnist", *MNIST)
def test_the_command_writes_a_row_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "follow.csv"
    bench = ["--model", "lenet5", "--steps", "30", "--device", "cpu", "--data-dir", str(FOLDER), "--out", str(out)]
    assert run(["bench", "follow", *bench]) == 0
    shown = capsys.readouterr().out
    assert "LeNet-5" in shown
    assert "divided by 10 after step 15" in " ".join(shown.split())
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 31))
    for row in rows:
        assert math.isclose(float(row["count_over_k"]), int(row["count"]) / 62, abs_tol=1e-3)
        assert all(row[key] for key in ("device", "torch", "sparsync", "date", "python", "density", "loss"))
