"""The compressors' state as it was when a step began, so that the step can be undone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparsync.compressors import State


class Snapshot:
    """A copy of a state, in buffers that stay.

    Tensors that are views of one table, as those of the fused kernels are, are copied as one.
    """

    def __init__(self) -> None:
        self._bases: dict[int, tuple[Tensor, Tensor]] = {}  # by the table's id: the table, and a copy
        self._bags: dict[str, dict[str, Tensor]] = {}  # views of the copies

    def take(self, state: State) -> None:
        """Remember ``state``."""
        known, self._bases, self._bags = self._bases, {}, {}
        for name, bag in state.items():
            self.add(name, bag, known)

    def add(
        self, name: str, bag: Mapping[str, Tensor], known: Mapping[int, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        """Remember a bag that came up since; ``known``: tables there were copies of before."""
        self._bags[name] = {key: self._copy_of(tensor, known or {}) for key, tensor in bag.items()}

    def restore(self, state: State) -> None:
        """Make ``state`` what it was, its tensors staying where they are, in new bags: whoever knows the old ones looks
        at the values again."""
        for name in [name for name in state if name not in self._bags]:
            del state[name]
        done = set()
        for name, bag in self._bags.items():
            for key, copy in bag.items():
                tensor = state[name][key]
                base = _base(tensor)
                whole = self._bases.get(id(base))
                if whole is None:  # it moved into another table meanwhile
                    tensor.copy_(copy)
                elif id(base) not in done:
                    base.copy_(whole[1])
                    done.add(id(base))
        state.update({name: dict(bag) for name, bag in state.items()})

    def _copy_of(self, tensor: Tensor, known: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        base = _base(tensor)
        if id(base) not in self._bases:
            old = known.get(id(base))
            copy = old[1].copy_(base) if old is not None and old[0] is base else base.clone()
            self._bases[id(base)] = base, copy
        copy = self._bases[id(base)][1]
        return copy if base is tensor else copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _base(tensor: Tensor) -> Tensor:
    """Return the tensor that this is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base
