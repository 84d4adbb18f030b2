"""Parameters that take no part in a step, on some ranks or on all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import BlockRandomK, RandomK, TopK
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SQUARE,
    Chain,
    ErrorFeedbackReference,
    MassBalance,
    loss_of,
    training,
)


def case_skipped_bucket(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(Chain(SIZES), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    for scope in ("layer", "bucket", "global"):
        with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
            sparsync.attach(ddp, "topk", scope=scope)
    del ddp
    gc.collect()


def test_skip_all_reduce_unused_params_is_refused(worlds: Any) -> None:
    worlds[2].run(case_skipped_bucket)


def case_unused_everywhere(rank: int, size: int, compressor: Any, **options: Any) -> None:
    model = Chain(SQUARE)
    balance = MassBalance(model)
    with training(model, compressor, {"find_unused_parameters": True}, dense_below=0, **options) as run:
        for step in range(6):
            without = "layer1" if step in (2, 3) else ""
            before = run.residuals()
            balance.step(run, lambda m, step=step, without=without: loss_of(m, rank, step, without))
            if without:
                assert before["layer1.weight"].any()
                assert torch.equal(run.residuals()["layer1.weight"], before["layer1.weight"])
                assert not torch.equal(run.residuals()["layer2.weight"], before["layer2.weight"])
        balance.assert_balanced(run)


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_a_parameter_unused_on_every_rank_keeps_its_residual(worlds: Any, scope: str) -> None:
    """DDP throws the result of such a parameter away, so nothing is sent from it: its residual waits, bit for bit."""
    worlds[2].run(case_unused_everywhere, compressor=TopK(0.05), scope=scope)


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [(RandomK(0.05), "shared"), (BlockRandomK(0.05), "shared"), (BlockRandomK(0.05), "allgather")],
    ids=["shared", "shared block", "block"],
)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_kinds_that_send_zeros_send_them_from_a_parameter_unused_on_every_rank(
    worlds: Any, scope: str, compressor: Any, collective: str
) -> None:
    """Where indices do not travel, or only a block's start, entries of such a parameter are sent as zeros."""
    worlds[2].run(case_unused_everywhere, compressor=compressor, collective=collective, scope=scope)


def case_unused_on_some(rank: int, size: int, scope: str) -> None:
    model = Chain(SQUARE)
    reference, balance = ErrorFeedbackReference(model, 0.05), MassBalance(model)
    options = {"scope": scope} | ALL_SPARSE
    with training(model, TopK(0.05), {"find_unused_parameters": True}, **options) as run:
        for step in range(6):
            without = "layer1" if step >= 2 and rank == step % size else ""

            def loss(m: nn.Module, step: int = step, without: str = without) -> Tensor:
                return loss_of(m, rank, step, without)

            balance.step(run, loss)
            if scope == "layer":
                reference.step(loss)
                reference.assert_same(run)
        balance.assert_balanced(run)


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_a_parameter_unused_on_some_ranks_loses_nothing(worlds: Any, scope: str) -> None:
    worlds[3].run(case_unused_on_some, scope=scope)
