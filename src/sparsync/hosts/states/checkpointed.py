"""What a handle keeps, saved and loaded: one state for each rank, or rows of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparsync.engine.auto import AutoSwitch
from sparsync.engine.reducer import Reducer
from sparsync.errors import SparsyncError
from sparsync.hosts.states.sharded import (
    StatefulRows,
    make_room,
    own_state,
    read_rows,
    reader_of,
    refuse_plain_state,
    to_rows,
)


class Checkpointed(ABC):
    """The part of a handle that saves and loads.

    Attributes:
        shards: says, where this rank has parts of parameters alone, which these are.
    """

    shards: str | None
    _auto: AutoSwitch | None
    _restarts: int

    @abstractmethod
    def _running(self) -> Reducer: ...

    @abstractmethod
    def _peers(self) -> Any: ...

    @abstractmethod
    def _device(self) -> torch.device: ...

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, thresholds and step: tensors and plain types only. Save one per rank."""
        refuse_plain_state(sys._getframe(1).f_globals.get("__name__", ""))
        state = self._running().state_dict()
        return state if self._auto is None else {**state, "auto": self._auto.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``: this rank's own, or those of all ranks of a run of any size, in order."""
        self._load(state)
        self._restarts = 0  # and nothing is lost by them

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` for ``torch.distributed.checkpoint``: ``DTensor``s that have a row for every rank."""
        self._refuse_shards("sharded_state_dict()", "state_dict()")
        return to_rows(self.state_dict(), self._keepers(), self._device())

    def stateful(self, checkpoint: Any = None, key: str | None = None) -> StatefulRows:
        """Return this handle as ``torch.distributed.checkpoint`` takes it: every rank's state is its own row.

        ``dcp.save({"model": …, "sync": sync.stateful()}, checkpoint_id=folder)``, and on any number of ranks
        ``dcp.load({"model": …, "sync": sync.stateful(folder)}, checkpoint_id=folder)``: the same bits on as many
        ranks as saved it, the same mean on others.

        Args:
            checkpoint: the folder that is going to be loaded, or its ``StorageReader``; ``None`` to save.
            key: under which it was saved; needed if the checkpoint has several such states.
        """
        self._refuse_shards("stateful()", "state_dict()")

        def room() -> dict[str, Any]:
            nodes = self._running().stage.groups
            return make_room(reader_of(checkpoint), key, self._device(), self._keepers(), nodes)

        def own(filled: dict[str, Any]) -> dict[str, Any]:
            return own_state(filled, self._peers(), self._running().stage.groups)

        return StatefulRows(
            self.sharded_state_dict, self.load_state_dict, room if checkpoint is not None else None, own
        )

    def load_sharded(self, checkpoint: Any, key: str = "sparsync") -> None:
        """Continue from ``sharded_state_dict()``, saved by any number of ranks; all ranks call this.

        Args:
            checkpoint: the folder that was saved to, or a ``StorageReader``.
            key: under which it was saved.
        """
        self._refuse_shards("load_sharded()", "load_state_dict()")
        nodes = self._running().stage.groups
        self.load_state_dict(read_rows(checkpoint, key, self._peers(), self._device(), self._keepers(), nodes))

    def check_state(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Refuse, with a ``ValueError``, what ``load_state_dict`` cannot continue from; changes nothing."""
        self._running().check_state(state)
        if self._auto is not None:
            self._auto.check_state(state if isinstance(state, Mapping) else state[0])

    @torch.inference_mode(False)
    def _load(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        if self._auto is not None:
            self.check_state(state)  # of both, before either is changed
        self._running().load_state_dict(state)
        if self._auto is not None:
            self._auto.load_state_dict(state if isinstance(state, Mapping) else state[0])

    def _refuse_shards(self, asked: str, instead: str) -> None:
        if self.shards:
            raise SparsyncError(f"{asked} does not know models of fully_shard: use {instead} on each rank")

    def _keepers(self) -> Any:
        """Return the process group of the ranks that keep something; ``None`` on a rank that keeps nothing."""
        stage = self._running().stage
        if not stage.groups:
            return self._peers()
        return stage.between.group if stage.between is not None else None
