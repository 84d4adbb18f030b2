"""The other settings of the code of P1's authors: each is what is trained, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparsync_lab.papers import RunContext, trainings
from sparsync_lab.papers.authors_other_settings import (
    changes,
    other_settings,
    others_told,
    resized,
    weights_alone,
    with_their_epochs,
    without_them,
)
from sparsync_lab.papers.p1_convergence import figure_1, figure_6
from sparsync_lab.papers.run import rate_factor
from sparsync_lab.papers.tasks import make_task
from tests.lab.test_evidence import stored_run


def test_weight_decay_of_weights_alone_leaves_biases_and_norms() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    nn.init.ones_(model[1].bias)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run = replace(weights_alone("resnet20", "topk")[0], weight_decay=0.5)
    optimizer = trainings.run_optimizer(run, SimpleNamespace(model=model))  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert shrunk == [True, False, False, False]
    with pytest.raises(ValueError, match="decays_weights_only is for sgd, got 'adamw'"):
        trainings.run_optimizer(replace(run, optimizer="adamw"), SimpleNamespace(model=model))  # type: ignore[arg-type]


def test_resized_images_have_no_zeros_round_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsync_lab.data import Images
    from sparsync_lab.papers import tasks

    x, y = torch.rand(8, 1, 28, 28), torch.arange(8)
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: (kind, Images(x, y, x, y, 10)))
    how = {"workers": 2, "batch": 4, "seed": 0, "limit": None}
    plain, large = (make_task("lenet5", None, torch.device("cpu"), resized=side, **how) for side in (None, 32))  # type: ignore[arg-type]
    (images, _), *_ = next(large.batches(0))
    assert images.shape == (4, 1, 32, 32)
    assert images.min() >= x.min() > 0  # bilinear, between what was there
    assert next(plain.batches(0))[0][0].shape == (4, 1, 28, 28)
    assert large.checksum != plain.checksum
    sizes = [[tuple(p.shape) for p in task.model.parameters()] for task in (plain, large)]
    assert sizes[0] == sizes[1]
    assert 0 <= large.evaluate() <= 1


def test_only_lenet5_is_resized(tmp_path: Path) -> None:
    run = replace(resized("dense")[0], model="fnn3")
    with pytest.raises(ValueError, match="resized is for LeNet-5, got 'fnn3'"):
        trainings.train_run(run, RunContext(output=tmp_path, scratch=tmp_path))


def test_their_epochs_have_their_schedule_and_begin_like_the_other() -> None:
    own, before = with_their_epochs("vgg16", "topk")
    assert [rate_factor(own, epoch / 141) for epoch in (80.9, 81.1, 121.9, 122.1)] == pytest.approx([1, 0.1, 0.1, 0.01])
    few, _ = with_their_epochs("lenet5", "topk")
    assert rate_factor(few, 79.9 / 80) == 1  # it ends before the first division
    for run, epochs in ((own, 141), (before, 120), (few, 80)):
        assert rate_factor(run, 2.5 / epochs) == pytest.approx(0.5)  # of 5 epochs of warm-up
        assert run.densities
        assert [share * epochs for share, _ in run.densities] == pytest.approx([1, 2])
        assert run.epochs == epochs
    assert not own.autocast
    assert not before.autocast


def test_each_pair_differs_in_its_setting_alone() -> None:
    of_epochs = {"epochs", "warmup", "decay", "densities"}
    for change in changes():
        for own, before in change.pairs.values():
            assert own.model == before.model == change.model
            differing = {name for name in vars(own) if getattr(own, name) != getattr(before, name)} - {"label", "name"}
            if "epochs" in change.words:
                assert {"epochs", "warmup", "decay"} <= differing <= of_epochs
            else:
                assert differing == {"resized" if "resized" in change.words else "decays_weights_only"}
    assert not {run.name for run in other_settings()} & {run.name for run in without_them()}


def test_what_they_change_is_told_once_it_is_trained(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    own, before = weights_alone("lenet5", "topk")
    stored_run(context, own, 0.9)
    assert others_told(context, 3.0).startswith("Not run, so that the effect is not known: LeNet-5, weight decay of")
    stored_run(context, before, 0.88)
    told = "instead of all parameters: LeNet-5, TopK-SGD 90.00 % (2.00 points above without) (one seed each)."
    assert told in others_told(context, 3.0)
    assert "not known: LeNet-5, weight decay" in others_told(context, 3.0)  # of dense
    for run, score in zip(resized("dense"), (0.987, 0.988), strict=True):
        stored_run(context, run, score)
    assert "; images resized, instead of padded: LeNet-5, dense 98.70 % (under a point from without)" in others_told(
        context, 3.0
    )
    for run, score in zip(with_their_epochs("vgg16", "topk"), (0.9, 0.88), strict=True):
        stored_run(context, run, score)
    within = "VGG-16, TopK-SGD 90.00 % (within the spread of its trainings from without)"
    assert [within in others_told(context, spread) for spread in (3.0, 1.0)] == [True, False]
    for run in (*other_settings(), *without_them()):
        stored_run(context, run, 0.9)
    assert "Not run" not in others_told(context, 3.0)
    for figure in (figure_1, figure_6):
        assert any(note.endswith(others_told(context, inf)) for note in figure(context.read_only()).notes)
