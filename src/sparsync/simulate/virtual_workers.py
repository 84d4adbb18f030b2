"""P workers in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.compressors import Compressor
from sparsync.config import resolve
from sparsync.config.nodes import groups_of
from sparsync.config.recipes import AUTO
from sparsync.engine.budget import plan_for
from sparsync.feedback import (
    TakenMomentum,
    TakenOptimizer,
    momentum_notice,
    rates_by_name,
    refuse_other_model,
    take_momentum,
)
from sparsync.layout import Parameter
from sparsync.simulate.exchange import VirtualExchange
from sparsync.simulate.sequential import Batch, Carried, Loss, SequentialPasses
from sparsync.simulate.virtual_units import Tally

log = logging.getLogger("sparsync")
SCHEMA = 2
UNSUPPORTED = ("scaler", "transactional", "deadline", "debug")


class VirtualWorkers:
    """P workers that train one set of weights, as P processes would with DDP and ``sparsync.attach``.

    On the CPU, with one thread, the weights equal those of real processes bit for bit wherever sums run in rank order:
    with ``AllGather``, ``GTopK`` and ``Balanced``, and with two workers always. Dense sums (small tensors that travel
    dense, ``NoCompression``, the sum inside a node of more than two workers) and ``SharedIndexAllReduce`` are the
    backend's own there; here they run in rank order, which differs by rounding. ``NoCompression`` with ``clip`` clips
    each of DDP's buckets there, and here, where there are none, the whole gradient. Workers draw from one random state,
    one after another: their dropout is not that of processes.

    Args:
        model: in training mode, on its device. It holds rank 0's buffers.
        loss_fn: ``(model, batch, carried) -> (loss, carried)`` with the model that it is given; ``batch`` is a tuple of
            tensors, and so is ``carried``: what the worker carries on from step to step, detached; ``()`` for nothing.
        optimizer: of the model's parameters.
        workers: P.
        compressor, recipe, options: as ``sparsync.attach`` takes them. ``compressor="none"`` is plain DDP. Not all of
            them: ``scope="bucket"`` needs DDP's buckets, ``scaler`` and ``transactional`` are left out.
        carried: what every worker starts from.
        graph: replay forward and backward from a CUDA graph; by default on a GPU. Needs batches of equal shapes and a
            ``loss_fn`` that never waits for the GPU. So is the exchange, where nothing in it waits: ``threshold``,
            ``topk``, ``trimmed``, ``gaussian`` and ``none``, by ``allgather``, ``balanced``, ``gtopk`` and ``dense``;
            ``random`` and ``block`` by all of these and ``shared``, unless they are clipped.
        streams: in the graph, as many workers run side by side.
        passes: how forward and backward run: one worker after another, or another class of the same interface.
        exchange: makes what exchanges the gradients; another class of the same interface may exchange them otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        workers: int,
        *,
        compressor: str | Compressor | None = None,
        recipe: str | None = None,
        carried: Carried = (),
        graph: bool | None = None,
        streams: int = 1,
        passes: type[SequentialPasses] = SequentialPasses,
        exchange: Callable[..., VirtualExchange] = VirtualExchange,
        **options: Any,
    ) -> None:
        if not (isinstance(workers, int) and workers >= 1):
            raise ValueError(f"workers must be 1 or more, got {workers!r}")
        if not (isinstance(streams, int) and streams >= 1):
            raise ValueError(f"streams must be 1 or more, got {streams!r}")
        for name in UNSUPPORTED:
            if name in options:
                raise ValueError(f"virtual workers do not take {name}=, got {options[name]!r}")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        asked = resolve(recipe, compressor=compressor, optimizer=optimizer, **options)
        if asked.recipe == AUTO:
            raise ValueError("'auto' times steps on a network, and virtual workers have none: take recipe='default'")
        plan = plan_for(asked, named, workers, groups_of(asked.per_node, [""] * workers))
        if plan.unit_scope == "bucket" and not plan.compressor.dense:
            raise ValueError(
                "scope must be 'layer' or 'global' with virtual workers: only DDP has buckets, got 'bucket'"
            )
        refuse_other_model(optimizer, model)
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self._names = {id(p): name for name, p in named.items()}
        device = next(model.parameters()).device
        graph = device.type == "cuda" if graph is None else graph
        if graph and device.type != "cuda":
            raise ValueError("graph=True needs the model on a GPU")
        parameters = [Parameter.of(name, p) for name, p in named.items()]
        self._exchange = exchange(plan, parameters, plan.dense_names(named), workers, device, graph, streams)
        trained = [p for p in parameters if p.numel]
        self._parameters = [model.get_parameter(p.name) for p in trained]
        places = [self._exchange.place(p) for p in trained]
        self._means = [mean for _, mean in places]
        self._gradients = {p.name: rows for p, (rows, _) in zip(trained, places, strict=True)}
        views = [[rows[rank] for rows, _ in places] for rank in range(workers)]
        self._passes = passes(model, loss_fn, self._parameters, views, carried, graph, streams)
        beta = plan.correction.beta if plan.correction else 0.0
        self._taken: TakenOptimizer | TakenMomentum | None
        if self._exchange.preconditioner is not None:
            by_name, feedbacks = {p.name: p for p in parameters}, [w.feedback for w in self._exchange.workers]
            self._taken = TakenOptimizer(
                optimizer, self._names, by_name, self._exchange.preconditioner, feedbacks, partial(log.warning, "%s")
            )
        else:
            self._taken = take_momentum(optimizer, plan.momentum, beta)
        known = plan.momentum_asked or plan.compressor.dense
        told = momentum_notice(self._taken, optimizer, known, plan.density_at(0))
        if told:
            log.warning("%s", told)

    @property
    def workers(self) -> int:
        return len(self._exchange.workers)

    @property
    def models(self) -> Sequence[nn.Module]:
        """Of every worker: the same parameters, and buffers of its own; in batched passes rank 0's for all."""
        return self._passes.models

    @property
    def step(self) -> int:
        """Steps made."""
        return self._exchange.tally.steps

    @property
    def tally(self) -> Tally:
        """Bytes and entries of all steps."""
        return self._exchange.tally

    @property
    def fallbacks(self) -> int:
        """How often, over all workers, segments and steps, a compressor that counts it fell back to exact top-k."""
        bags = (bag for worker in self._exchange.workers for bag in worker.compressor_state.values())
        return sum(int(bag["fallbacks"]) for bag in bags if "fallbacks" in bag)

    def backward(self, batches: Sequence[Batch]) -> Tensor:
        """Put the exchanged mean of all workers' gradients into ``.grad``; the mean of their losses, on the device.

        Args:
            batches: one tuple of tensors a worker, in rank order.
        """
        loss = self._passes.run(batches).mean()
        with torch.no_grad():
            taken = self._taken if isinstance(self._taken, TakenOptimizer) else None
            for parameter in self._parameters if taken else ():
                decay = taken.decays().get(id(parameter)) if taken else None
                for row in self._gradients[self._names[id(parameter)]] if decay else ():
                    row.add_(parameter, alpha=decay)
            rates = rates_by_name(self.optimizer, self._names) if self.plan.follow_lr else None
            self._exchange.reduce(rates, taken.rules() if taken else None)
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            parameter.grad = mean
        return loss

    def advance(self, batches: Sequence[Batch]) -> Tensor:
        """Call ``backward``, then step the optimizer. Between the two you may clip, or look at, the mean."""
        loss = self.backward(batches)
        self.optimizer.step()
        return loss

    def gradient(self, rank: int, name: str) -> Tensor:
        """Return a worker's own gradient of a parameter in the last step, in its shape; the next overwrites it."""
        return self._gradients[name][rank]

    def residual(self, rank: int, name: str) -> Tensor | None:
        """Return a worker's residual of a parameter, in the parameter's shape; ``None`` if it keeps nothing."""
        return self._exchange.workers[rank].feedback.residual(name)

    def forget(self) -> None:
        """Let every worker carry on from the start again, as at the beginning of an epoch."""
        self._passes.carry([self._passes.first] * self.workers)

    def detach(self) -> None:
        """Give the optimizer its own update back, if that was replaced."""
        if self._taken is not None:
            self._taken.undo()
            self._taken = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that a training needs to go on: tensors and plain types only.

        ``ranks`` holds of every worker what ``Handle.load_state_dict`` takes in a process of its own.
        """
        tally = self._exchange.tally
        device = self._parameters[0].device
        return {
            "schema": SCHEMA,
            "workers": self.workers,
            "step": self.step,
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "ranks": self._exchange.state_dict(),
            "carried": [tuple(tensor.clone() for tensor in state) for state in self._passes.carried],
            "tally": dict(vars(tally)),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of as many workers with the same options; torch's random state is set, too."""
        if state.get("schema") != SCHEMA:
            raise ValueError(f"this is not a state of virtual workers of schema {SCHEMA}: {state.get('schema')!r}")
        if state["workers"] != self.workers:
            raise ValueError(f"this is the state of {state['workers']} workers, and here are {self.workers}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._exchange.load_state_dict(state["ranks"])
        self._exchange.tally = Tally(**state["tally"])
        self._passes.carry(state["carried"])
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self._parameters[0].device)
