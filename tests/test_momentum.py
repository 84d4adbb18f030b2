"""Momentum moved out of the optimizer or before the residual, and recipes."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.config.recipes import fill_in
from sparsync.feedback.momentum import TakenMomentum
from tests.failures.ddp_training import logged
from tests.models import local_gradients, loss_of, net, weights


def test_moved_momentum_is_a_larger_rate_and_schedulers_go_on():
    model = net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.75, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # made before, knows nothing of us
    moved = TakenMomentum(optimizer)
    plain = torch.optim.SGD(twin.parameters(), lr=0.08, weight_decay=0.01)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    before = copy.deepcopy(optimizer.state_dict())
    for step in range(6):
        for one, its, rate in ((model, optimizer, scheduler), (twin, plain, plain_scheduler)):
            its.zero_grad()
            loss_of(one, 0, step).backward()
            its.step()
            rate.step()
        if step == 3:  # a checkpoint brings groups and state of its own
            saved = copy.deepcopy(before)
            saved["param_groups"][0].update(lr=optimizer.param_groups[0]["lr"])
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["momentum"] == 0.75
        assert torch.equal(weights(model), weights(twin))
    assert optimizer.param_groups[0]["lr"] == 0.02 * 0.5**3
    moved.undo()
    assert optimizer.param_groups[0]["momentum"] == 0.75
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert any("momentum_buffer" in state for state in optimizer.state.values())


def test_an_optimizer_without_momentum_is_refused():
    with pytest.raises(ValueError, match="rule of torch's SGD, Adam and AdamW alone, got Adagrad; leave momentum out"):
        TakenMomentum(torch.optim.Adagrad(net().parameters()))


def case_attach(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    with logged() as told, warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsync.attach(ddp, "topk", density=0.01, optimizer=optimizer).detach()
    assert [text.split(":")[0] for text in told] == (
        ["the optimizer's momentum of 0.9 stays behind a density of 0.01"] if rank == 0 else []
    )
    with logged() as told:
        sparsync.attach(ddp, "topk", density=0.02, optimizer=optimizer).detach()
    assert told == []
    handle = sparsync.attach(ddp, "topk", density=0.01, optimizer=optimizer, momentum="move")
    assert "steps with momentum 0.9 left out and 10 x its learning rate" in handle.describe()
    before = weights(ddp.module)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    applied = torch.cat([p.grad.reshape(-1) for p in ddp.parameters()])
    torch.testing.assert_close(weights(ddp.module), before - 0.5 * applied)
    handle.detach()
    optimizer.step()
    assert any("momentum_buffer" in state for state in optimizer.state.values())
    del ddp
    gc.collect()


def test_attach_moves_momentum_until_detach(worlds):
    worlds[2].run(case_attach)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": "lose"}, "momentum must be one of keep, move, correct, got 'lose'"),
        ({"momentum": "move"}, "needs optimizer="),
        ({"recipe": "best"}, "recipe must be one of default, auto, balanced, paper, dgc, got 'best'"),
        ({"momentum": "correct", "beta": 1.0}, "beta must be from 0 to below 1, got 1.0"),
        ({"clip": 0.0}, "clip must be a norm above 0, got 0.0"),
        ({"momentum": "keep", "beta": 0.7}, r"beta=0.7 needs momentum='correct', and momentum is 'keep' here$"),
        ({"compressor": "topk", "masking": False}, "masking=False needs momentum='correct'"),
        ({"recipe": "balanced", "beta": 0.7}, "momentum is 'keep' here: without optimizer= there is no momentum"),
        ({"follow_lr": True}, "follow_lr=True needs optimizer="),
        ({"scaler": torch.amp.GradScaler("cpu"), "transactional": False}, "scaler= needs steps that can be undone"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        sparsync.comm_hook(net(), **options)


def test_a_checkpoint_of_the_optimizer_fits_before_and_after():
    """Loaded before or after the momentum is taken out, also from an older version, the steps are as large."""
    first = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    TakenMomentum(first)
    saved = copy.deepcopy(first.state_dict())
    old = copy.deepcopy(saved)
    old["param_groups"][0].update(momentum=0.0, sparsync_momentum=0.9)
    for state in (saved, old):
        for order in ("load, attach", "attach, load"):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if order == "attach, load":
                TakenMomentum(optimizer)
                optimizer.load_state_dict(copy.deepcopy(state))
            else:
                optimizer.load_state_dict(copy.deepcopy(state))
                TakenMomentum(optimizer)
            before = weights(model)
            model[0].weight.grad = torch.ones_like(model[0].weight)
            optimizer.step()
            assert (before - weights(model)).max().item() == pytest.approx(1.0, rel=1e-5), order
            assert optimizer.state_dict()["param_groups"] == saved["param_groups"]


def test_adams_steps_have_lower_betas_and_its_groups_never():
    results = []
    for betas in ((0.9, 0.995), (0.5, 0.99)):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=betas)
        if betas[0] == 0.9:
            taken = TakenMomentum(optimizer)
            assert "betas 0.9, 0.995 lowered to 0.5, 0.99" in taken.describe()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
            assert optimizer.param_groups[0]["betas"] == betas
        assert optimizer.state[model[0].weight]["step"] == 3
        results.append(weights(model))
    assert torch.equal(*results)
    with pytest.raises(ValueError, match=r"momentum='correct' works with .* torch's SGD alone, got AdamW"):
        TakenMomentum(optimizer, beta=0.5)


def train(ddp, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()


def case_correct_is_momentum(rank: int, size: int) -> None:
    """At density 1, correction of 0.9 without masking is SGD with momentum 0.9."""
    results = []
    for correct in (False, True):
        ddp = DistributedDataParallel(net(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        handle = None
        if correct:
            options = {"momentum": "correct", "beta": 0.9, "masking": False}
            handle = sparsync.attach(ddp, sparsync.TopK(1.0), optimizer=optimizer, **options)
            assert "0.9 before the residual, without masking" in handle.describe()
        train(ddp, optimizer, rank, range(8))
        results.append(weights(ddp.module))
        if handle is not None:
            handle.detach()
        del ddp
        gc.collect()
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def case_corrected_training(rank: int, size: int, scope: str) -> None:
    """What came in as velocity is what was applied plus what is kept; a checkpoint repeats the same bits."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    options = {"scope": scope, "density": 0.05, "dense_below": 100, "momentum": "correct", "beta": 0.7, "clip": 0.5}
    handle = sparsync.attach(ddp, "topk", optimizer=optimizer, masking=False, **options)
    names = dict(ddp.module.named_parameters())
    velocity = {n: torch.zeros_like(p) for n, p in names.items()}
    came = {n: torch.zeros_like(p) for n, p in names.items()}
    applied = {n: torch.zeros_like(p) for n, p in names.items()}
    for step in range(4):
        local = local_gradients(ddp, rank, step)
        small = torch.cat([local[n].reshape(-1) for n in names if n in handle.dense_names]).norm().item()
        large = torch.cat([local[n].reshape(-1) for n in names if n not in handle.dense_names]).norm().item()
        for n, grad in local.items():
            norm = small if n in handle.dense_names else large if scope == "global" else grad.norm().item()
            velocity[n] = 0.7 * velocity[n] + grad * min(1.0, 0.5 / norm)
            came[n] += velocity[n]
        train(ddp, optimizer, rank, [step])
        for n, p in names.items():
            applied[n] += p.grad
            torch.testing.assert_close(handle.velocity(n), velocity[n])
    for n in names:
        kept = handle.residual(n)
        total = came[n] - (0 if kept is None else kept)
        dist.all_reduce(total)
        torch.testing.assert_close(applied[n], total / size, rtol=1e-4, atol=1e-6)
    handle.detach()

    handle = sparsync.attach(ddp, "topk", optimizer=optimizer, **options)
    train(ddp, optimizer, rank, range(3))
    saved, middle = handle.state_dict(), copy.deepcopy(ddp.module.state_dict())
    assert saved["velocities"]
    train(ddp, optimizer, rank, range(3, 6))
    wanted = weights(ddp.module)
    handle.detach()
    ddp.module.load_state_dict(middle)
    handle = sparsync.attach(ddp, "topk", optimizer=optimizer, **options)
    handle.load_state_dict(saved)
    train(ddp, optimizer, rank, range(3, 6))
    assert torch.equal(weights(ddp.module), wanted)
    handle.detach()
    handle = sparsync.attach(ddp, "topk")
    with pytest.raises(ValueError, match="the checkpoint holds velocities"):
        handle.load_state_dict(saved)
    handle.detach()
    del ddp
    gc.collect()


def case_rollback(rank: int, size: int) -> None:
    """A step that is undone leaves velocities as they were; a loss scale scales them."""
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    handle = sparsync.attach(ddp, "topk", density=0.05, optimizer=optimizer, momentum="correct", transactional=True)
    train(ddp, optimizer, rank, range(2))
    handle.commit()
    before = {n: handle.velocity(n).clone() for n, _ in ddp.module.named_parameters()}
    train(ddp, optimizer, rank, [2])
    assert not torch.equal(handle.velocity("0.weight"), before["0.weight"])
    handle.rollback()
    for n, kept in before.items():
        assert torch.equal(handle.velocity(n), kept)
    handle.detach()
    del ddp
    gc.collect()


def test_correction_of_everything_is_momentum(worlds):
    worlds[2].run(case_correct_is_momentum)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_corrected_training_loses_nothing(worlds, scope):
    worlds[3].run(case_corrected_training, scope=scope)


def test_undone_steps_leave_the_velocity(worlds):
    worlds[2].run(case_rollback)


def case_recipes(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    handle = sparsync.attach(ddp, optimizer=optimizer)
    told = handle.describe()
    for words in (
        "recipe       default",
        "ThresholdK",
        "budget       1/60",
        "values as sign, indices as ef",
        "5 x its",
    ):
        assert words in told, told
    train(ddp, optimizer, rank, range(3))
    handle.detach()
    handle = sparsync.attach(ddp, optimizer=optimizer, density=0.05, values="fp32", momentum="keep")
    assert "density 0.05" in handle.describe()
    assert "values as fp32, indices as ef" in handle.describe()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    handle.detach()
    handle = sparsync.attach(ddp, optimizer=optimizer, recipe="paper")
    assert "TopK (scope global, density 0.001" in handle.describe()
    assert not handle.dense_names
    handle.detach()
    handle = sparsync.attach(ddp, optimizer=optimizer, recipe="dgc")
    assert "0.9 before the residual, with masking" in handle.describe()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    train(ddp, optimizer, rank, range(2))
    handle.detach()
    handle = sparsync.attach(ddp, optimizer=optimizer, recipe="balanced")
    for words in ("density 0.05", "0.5 before the residual", "Balanced", "5 x its"):
        assert words in handle.describe(), handle.describe()
    train(ddp, optimizer, rank, range(3))
    handle.detach()
    adam = torch.optim.AdamW(ddp.parameters(), lr=0.001)
    handle = sparsync.attach(ddp, optimizer=adam, recipe="balanced")
    assert "momentum     0.5 where few entries are sent, up to the optimizer's own\n" in handle.describe()
    assert "with a second moment that all share (of rows and columns); what is not sent" in handle.describe()
    train(ddp, adam, rank, range(2))
    handle.detach()
    handle = sparsync.attach(ddp, optimizer=adam, recipe="balanced", precondition=False)  # nothing to correct
    assert "betas 0.9, 0.999 lowered to 0.5, 0.99" in handle.describe()
    train(ddp, adam, rank, range(2))
    handle.detach()
    handle = sparsync.attach(ddp)
    assert "pass optimizer=" in handle.describe()
    handle.detach()
    handle = sparsync.attach(ddp, "topk")
    assert "recipe       none" in handle.describe()
    assert "values as fp32, indices as int" in handle.describe()
    handle.detach()
    adagrad = torch.optim.Adagrad(ddp.parameters())
    handle = sparsync.attach(ddp, optimizer=adagrad)  # nothing to take out, and nobody asked for it
    handle.detach()
    del ddp
    gc.collect()


def test_recipes_fill_in_what_is_not_given(worlds):
    worlds[2].run(case_recipes)


def test_our_recipes_do_with_momentum_what_the_optimizer_allows() -> None:
    weights, other = [torch.zeros(3, requires_grad=True)], [torch.zeros(2, requires_grad=True)]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    taken = TakenMomentum(sgd, beta=0.5)
    for optimizer, corrected in (
        (sgd, "correct"),
        (torch.optim.SGD([{"params": weights, "momentum": 0.9}, {"params": other}]), "correct"),
        (torch.optim.SGD(weights, lr=0.1), "keep"),
        (torch.optim.AdamW(weights), "move"),
        (torch.optim.Adagrad(weights), "keep"),
        (None, "keep"),
    ):
        assert fill_in(None, {"optimizer": optimizer, "precondition": False})["momentum"] == corrected
        assert fill_in("balanced", {"optimizer": optimizer, "precondition": False})["momentum"] == corrected
    taken.undo()
    assert fill_in("balanced", {"optimizer": sgd, "beta": 0.7})["beta"] == 0.7
    with pytest.raises(ValueError, match=r"beta=0.7 .* 'move' here: AdamW has no momentum that could be corrected"):
        fill_in("balanced", {"optimizer": torch.optim.AdamW(weights), "beta": 0.7, "precondition": False})
    with pytest.raises(ValueError, match=r"beta=0.5 .* 'keep' here: SGD has no momentum"):
        fill_in("balanced", {"optimizer": torch.optim.SGD(weights, lr=0.1), "beta": 0.5})
    assert fill_in("balanced", {"momentum": "correct"})["momentum"] == "correct"  # whoever asks for it gets it
    assert fill_in("dgc", {})["momentum"] == "correct"
