"""Optimizers stay their users': values, schedulers, hooks, checkpoints; what differs, or cannot be known, is told."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import sparsync
from sparsync.config.recipes import fill_in
from sparsync.feedback.momentum import TakenMomentum, known_rule
from sparsync.simulate import VirtualWorkers
from tests.models import batch as batch_of
from tests.models import loss_of, net, weights


class Lion(Optimizer):
    """Signs of an interpolated momentum, as an optimizer that nobody here knows."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_((mean * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                    mean.lerp_(p.grad, 1 - second)


class StrangeSGD(SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)


class NamedSGD(SGD):
    """Adds nothing to the rule."""


@contextmanager
def warnings_told() -> Iterator[list[str]]:
    """Collect what the logger "sparsync" says at WARNING."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sparsync")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def is_sentence(text: str) -> bool:
    return "\n" not in text and ". " not in text and len(text) < 400


def train(model: nn.Module, optimizer: Optimizer, steps: range, scheduler: Any = None, rank: int = 0) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


RULES: dict[str, tuple[dict[str, Any], float]] = {
    "momentum": ({"momentum": 0.75}, 4.0),
    "dampening": ({"momentum": 0.9, "dampening": 0.9}, 1.0),
    "nesterov": ({"momentum": 0.75, "nesterov": True}, 4.0),
    "none": ({"dampening": 0.5}, 1.0),
    "maximize": ({"momentum": 0.5, "maximize": True, "weight_decay": 0.01}, 2.0),
    "decay": ({"momentum": 0.5, "weight_decay": 0.1}, 2.0),
    "foreach": ({"momentum": 0.5, "weight_decay": 0.1, "foreach": True}, 2.0),
    "fused": ({"momentum": 0.5, "weight_decay": 0.1, "fused": True}, 2.0),
    "tensor": ({"momentum": 0.5, "lr": torch.tensor(0.02)}, 2.0),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_updates_are_those_of_plain_sgd_at_the_rate_that_momentum_amounts_to(rule: str, beta: float) -> None:
    options = {"lr": 0.02} | RULES[rule][0]
    factor = RULES[rule][1] * (1 - beta)
    if rule == "none":
        factor = 1.0  # there is nothing to take out: momentum ``beta`` is then wanted beside the rate
    model = net()
    twin = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), **options)
    held = copy.deepcopy(optimizer.state_dict()["param_groups"])
    TakenMomentum(optimizer, beta)
    plain = {name: options[name] for name in ("maximize", "foreach", "fused") if name in options}
    decay = options.get("weight_decay", 0.0) / (1 - beta)
    other = SGD(twin.parameters(), lr=options["lr"] * factor, weight_decay=decay, **plain)
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        train(twin, other, range(step, step + 1))
        torch.testing.assert_close(weights(model), weights(twin))
        assert optimizer.state_dict()["param_groups"] == held
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("rule", ["momentum", "dampening", "nesterov", "maximize", "decay"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_in_the_long_run_updates_are_the_optimizers_own(rule: str, beta: float) -> None:
    """A steady gradient moves parameters at the speed of SGD with its momentum; so does weight decay."""
    options = {"lr": 1e-5} | RULES[rule][0]
    moves = []
    for taken in (False, True):
        p = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
        optimizer = SGD([p], **options)
        if taken:
            TakenMomentum(optimizer, beta)
        velocity = torch.zeros_like(p)
        for _ in range(400):
            before = p.detach().clone()
            velocity = beta * velocity + torch.tensor([0.1, -0.2])
            p.grad = velocity.clone() if taken else torch.tensor([0.1, -0.2], dtype=torch.float64)
            optimizer.step()
        moves.append(p.detach() - before)
    torch.testing.assert_close(moves[0], moves[1], rtol=1e-3, atol=0)


def test_a_group_without_momentum_beside_one_that_has_it_keeps_its_rate_in_the_long_run() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([{"params": [one], "momentum": 0.9}, {"params": [two]}], lr=0.1)
    TakenMomentum(optimizer, beta=0.5)
    one.grad, two.grad = torch.full((1,), 2.0), torch.full((1,), 2.0)  # a gradient of 1, after the velocity
    optimizer.step()
    torch.testing.assert_close(one.detach(), torch.tensor([-1.0]))
    torch.testing.assert_close(two.detach(), torch.tensor([-0.1]))


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=12, base_momentum=0.6, max_momentum=0.9)


def test_a_scheduler_may_cycle_momentum_and_the_rate_follows_it() -> None:
    model = net()
    twin, free = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, plain = SGD(model.parameters(), lr=0.01, momentum=0.9), SGD(twin.parameters(), lr=0.01)
    untouched = SGD(free.parameters(), lr=0.01, momentum=0.9)
    scheduler, its = one_cycle(optimizer), one_cycle(untouched)
    taken = TakenMomentum(optimizer)
    seen = set()
    for step in range(11):
        group = untouched.param_groups[0]
        assert optimizer.state_dict()["param_groups"] == untouched.state_dict()["param_groups"]
        seen.add(group["momentum"])
        plain.param_groups[0]["lr"] = group["lr"] / (1 - group["momentum"])
        train(model, optimizer, range(step, step + 1), scheduler)
        train(twin, plain, range(step, step + 1))
        train(free, untouched, range(step, step + 1), its)
        torch.testing.assert_close(weights(model), weights(twin))
    assert len(seen) > 5
    taken.undo()
    assert optimizer.state_dict()["param_groups"] == untouched.state_dict()["param_groups"]


def test_a_scheduler_may_cycle_betas() -> None:
    model, free = net(), net()
    optimizer, untouched = AdamW(model.parameters(), lr=0.01), AdamW(free.parameters(), lr=0.01)
    scheduler, its = one_cycle(optimizer), one_cycle(untouched)
    taken = TakenMomentum(optimizer)
    for step in range(11):
        train(model, optimizer, range(step, step + 1), scheduler)
        train(free, untouched, range(step, step + 1), its)
        assert optimizer.state_dict()["param_groups"] == untouched.state_dict()["param_groups"]
    taken.undo()
    assert optimizer.state_dict()["param_groups"] == untouched.state_dict()["param_groups"]


@pytest.mark.parametrize("made", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, betas=(0.9, 0.98))])
def test_a_state_dict_is_right_for_a_plain_optimizer(made: Any) -> None:
    model = net()
    optimizer = made(model.parameters())
    TakenMomentum(optimizer)
    train(model, optimizer, range(3))
    plain = made(net().parameters())
    wanted = copy.deepcopy(plain.state_dict()["param_groups"])
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["param_groups"] == wanted


def test_a_checkpoint_while_attached_brings_adams_state() -> None:
    results = []
    for again in (False, True):
        model = net()
        optimizer = Adam(model.parameters(), lr=0.01)
        TakenMomentum(optimizer)
        train(model, optimizer, range(3))
        if again:  # go back to this point from another one
            saved, middle = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            train(model, optimizer, range(7, 9))
            optimizer.load_state_dict(saved)
            model.load_state_dict(middle)
        train(model, optimizer, range(3, 6))
        results.append(weights(model))
    assert torch.equal(*results)


def test_momentum_buffers_stay_until_a_step_makes_them_out_of_date() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    TakenMomentum(optimizer).undo()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    taken = TakenMomentum(optimizer)
    frozen = model[0].weight
    loss_of(model, 0, 2).backward()
    frozen.grad = None
    optimizer.step()
    assert {p for p, state in optimizer.state.items() if "momentum_buffer" in state} == {frozen}
    taken.undo()
    optimizer.zero_grad()
    loss_of(model, 0, 3).backward()
    optimizer.step()  # momentum begins anew, as in a first step
    torch.testing.assert_close(optimizer.state[model[2].weight]["momentum_buffer"], model[2].weight.grad)


def test_only_known_rules_are_known() -> None:
    weight = [nn.Parameter(torch.zeros(2, 2))]
    assert known_rule(NamedSGD(weight)) is known_rule(SGD(weight)) is SGD
    assert known_rule(AdamW(weight)) is known_rule(Adam(weight)) is Adam
    for unknown in (Lion(weight), StrangeSGD(weight), torch.optim.Muon(weight), torch.optim.NAdam(weight)):
        name = type(unknown).__name__
        assert known_rule(unknown) is None
        assert fill_in(None, {"optimizer": unknown})["momentum"] == "keep"
        with pytest.raises(ValueError, match=f"momentum='move' works with .* SGD, Adam and AdamW alone, got {name}"):
            TakenMomentum(unknown)
        with pytest.raises(ValueError, match=f"momentum='correct' works with .* SGD alone, got {name}"):
            TakenMomentum(unknown, beta=0.5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": 1.0}, "momentum must be below 1 to be moved or corrected, got 1.0"),
        ({"momentum": 0.9, "differentiable": True}, "differentiable=True needs"),
    ],
)
def test_what_has_no_step_without_momentum_is_refused(options: dict[str, Any], sentence: str) -> None:
    optimizer = SGD(net().parameters(), lr=0.1, **options)
    with pytest.raises(ValueError, match=sentence):
        TakenMomentum(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_sparse_gradients_are_applied_as_sgd_does() -> None:
    tables = [nn.Embedding(6, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table, rate in zip(tables, (0.1, 1.0), strict=True):
        optimizer = SGD(table.parameters(), lr=rate, momentum=0.9 if rate == 0.1 else 0.0)
        if rate == 0.1:
            TakenMomentum(optimizer)
        table(torch.tensor([1, 4])).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_hooks_of_all_optimizers_run_once_a_step() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    TakenMomentum(optimizer)
    seen: list[Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda its, *_: seen.append(its))
    try:
        train(model, optimizer, range(2))
    finally:
        hook.remove()
    assert seen == [optimizer, optimizer]


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_scaler_unscales_and_skips(fused: bool) -> None:
    """With ``fused`` both are left to the step."""
    model, twin = net(), net()
    optimizer, plain = SGD(model.parameters(), lr=0.02, momentum=0.75, fused=fused), SGD(twin.parameters(), lr=0.08)
    TakenMomentum(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        before = weights(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, step)).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert torch.equal(weights(model), before)
        else:
            train(twin, plain, range(step, step + 1))
            torch.testing.assert_close(weights(model), weights(twin))


def optimizers_of(model: nn.Module) -> dict[str, Optimizer | None]:
    return {
        "none": None,
        "sgd": SGD(model.parameters(), lr=0.01, momentum=0.9),
        "plain": SGD(model.parameters(), lr=0.01),
        "adamw": AdamW(model.parameters()),
        "lion": Lion(model.parameters()),
        "muon": torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.001),
        "adagrad": torch.optim.Adagrad(model.parameters()),
    }


TOLD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("sgd", {}, ("SGD", "momentum 0.9 left out and 5 x its learning rate and momentum of 0.5 before the residual")),
    ("sgd", {"momentum": "move"}, ("10 x its learning rate, because", "momentum='keep') turns this off")),
    ("adamw", {"momentum": "move"}, ("AdamW", "betas 0.9, 0.999 lowered", "momentum='keep') turns this off")),
    ("adamw", {}, ("AdamW applies what was exchanged", "because", "momentum='keep') turns this off")),
    ("none", {}, ("optimizer is not known", "second time", "worst", "optimizer=optimizer")),
    ("none", {"compressor": "topk"}, ("optimizer is not known",)),
    ("none", {"recipe": "dgc"}, ("optimizer is not known",)),
    ("lion", {}, ("Lion is left as it is", "betas of (0.9, 0.99) stays behind the residual", "second time")),
    ("muon", {}, ("Muon is left as it is", "momentum of 0.95 stays")),
    ("adagrad", {}, ("Adagrad is left as it is", "momentum, if any, stays")),
    ("none", {"momentum": "keep"}, ()),
    ("none", {"recipe": "paper"}, ()),
    ("none", {"compressor": "none"}, ()),
    ("lion", {"momentum": "keep"}, ()),
    ("plain", {}, ()),
]


def case_told(rank: int, size: int) -> list[list[str]]:
    """Return what is told of each way to attach, with three steps; nothing in the groups may differ after it."""
    ddp = DistributedDataParallel(net())
    every = []
    for name, options, _ in TOLD:
        optimizer = optimizers_of(ddp.module)[name]
        held = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] if optimizer else []
        with warnings_told() as told:
            handle = sparsync.attach(ddp, optimizer=optimizer, **options)
            for step in range(3):
                ddp.zero_grad()
                loss_of(ddp, rank, step).backward()
                if optimizer is not None:
                    optimizer.step()
            now = optimizer.state_dict()["param_groups"] if optimizer else []
            assert [{k: v for k, v in g.items() if k != "params"} for g in now] == held
            handle.detach()
        every.append(told)
    with pytest.raises(ValueError, match="momentum='move' works with"):
        sparsync.attach(ddp, optimizer=Lion(ddp.parameters()), momentum="move")
    del ddp
    gc.collect()
    return every


def test_changes_and_what_is_not_known_are_told_once(worlds: Any) -> None:
    first, second = worlds[2].run(case_told)
    for (name, options, words), told in zip(TOLD, first, strict=True):
        assert len(told) == (1 if words else 0), (name, options, told)
        assert all(is_sentence(line) for line in told), told
        assert all(word in line for line in told for word in words), (words, told)
    assert not any(second)


def case_whose_optimizer(rank: int, size: int) -> None:
    ddp, other = DistributedDataParallel(net()), net()
    for recipe in (None, "paper"):
        with pytest.raises(ValueError, match="SGD that is given as optimizer holds no parameter of this model"):
            sparsync.attach(ddp, optimizer=SGD(other.parameters(), lr=0.1, momentum=0.9), recipe=recipe)
    some = SGD([*other.parameters(), *ddp.module[2].parameters()], lr=0.1, momentum=0.9)
    handle = sparsync.attach(ddp, optimizer=some, follow_lr=True)
    before = weights(ddp.module[0])
    for step in range(3):
        some.zero_grad()
        loss_of(ddp, rank, step).backward()
        some.step()
        some.param_groups[0]["lr"] *= 0.5
    assert torch.equal(weights(ddp.module[0]), before)
    handle.detach()
    with pytest.raises(ValueError, match="holds no parameter"):
        VirtualWorkers(net(), lambda *_: None, some, 2)
    del ddp
    gc.collect()


def test_an_optimizer_of_another_model_is_refused_and_one_of_more_or_less_is_not(worlds: Any) -> None:
    worlds[2].run(case_whose_optimizer)


def case_scaler(rank: int, size: int, fused: bool, momentum: str) -> list[list[str]]:
    ddp = DistributedDataParallel(net())
    every = []
    for given, enabled in ((False, True), (True, True), (False, False)):
        optimizer = SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        options = {"scaler": scaler} if given else {}
        handle = sparsync.attach(ddp, "topk", density=0.1, optimizer=optimizer, momentum=momentum, **options)
        with warnings_told() as told:
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(ddp, rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
        handle.detach()
        every.append(told)
    del ddp
    gc.collect()
    return every


@pytest.mark.parametrize("momentum", ["keep", "move"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_that_was_forgotten_is_noticed(worlds: Any, fused: bool, momentum: str) -> None:
    (forgotten, given, disabled), second = worlds[2].run(case_scaler, fused=fused, momentum=momentum)
    assert len(forgotten) == 1
    assert is_sentence(forgotten[0])
    assert "scaler=scaler" in forgotten[0]
    assert not given
    assert not disabled
    assert not any(second)


def case_replicas(rank: int, size: int) -> Tensor:
    """Dampening, weight decay, groups and a changing momentum: as virtual workers have it."""
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(net())
    optimizer = strange(ddp.module)
    scheduler = one_cycle(optimizer)
    handle = sparsync.attach(ddp, optimizer=optimizer, recipe="balanced", dense_1d=False, dense_below=0)
    train(ddp, optimizer, range(6), scheduler, rank)
    handle.detach()
    result = weights(ddp.module)
    everybody = [torch.empty_like(result) for _ in range(size)]
    dist.all_gather(everybody, result)
    assert all(torch.equal(one, result) for one in everybody)
    del ddp
    gc.collect()
    return result


def strange(model: nn.Module) -> SGD:
    groups = [{"params": model[0].parameters(), "dampening": 0.5}, {"params": model[2:].parameters(), "momentum": 0.8}]
    return SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01)


def test_virtual_workers_step_as_real_ones_do(worlds: Any) -> None:
    real = worlds[3].run(case_replicas)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = net()
        optimizer = strange(model)
        scheduler = one_cycle(optimizer)
        team = VirtualWorkers(
            model,
            lambda one, batch, carried: (nn.functional.cross_entropy(one(batch[0]), batch[1]), carried),
            optimizer,
            3,
            recipe="balanced",
            dense_1d=False,
            dense_below=0,
        )
        for step in range(6):
            team.advance([batch_of(rank, step) for rank in range(3)])
            scheduler.step()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(weights(model), real[0])


def case_other_optimizer(rank: int, size: int, kind: str) -> list[list[str]]:
    """Train with an optimizer that was built after ``attach``, and with the one that was given."""
    made: Any = {"AdamW": lambda p: AdamW(p, lr=0.01), "SGD": lambda p: SGD(p, lr=0.01, momentum=0.9)}[kind]
    ddp, every = DistributedDataParallel(net()), []
    for anew in (True, False):
        given = made(ddp.parameters())
        handle = sparsync.attach(ddp, optimizer=given)
        optimizer, elsewhere = made(ddp.parameters()) if anew else given, made(net().parameters())
        with warnings_told() as told:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                optimizer.step()
                elsewhere.step()  # of another model, which is no matter
        handle.detach()
        made(ddp.parameters()).step()  # nor is anything after that
        every.append(told)
    del ddp
    gc.collect()
    return every


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizer_that_was_built_anew_is_noticed(worlds: Any, kind: str) -> None:
    (anew, given), second = worlds[2].run(case_other_optimizer, kind=kind)
    assert len(anew) == 1
    assert is_sentence(anew[0])
    assert f"({kind})" in anew[0]
    assert not given
    assert not any(second)
