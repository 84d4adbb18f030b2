"""The states of all ranks on the first of them, in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsync.hosts.states import gathered
from tests.world import World


def own_state(rank: int) -> dict[str, Any] | None:
    """Return a state whose size differs from rank to rank; the last has none."""
    numbers = torch.arange(300 * (rank + 1), dtype=torch.float32) + rank
    return None if rank == 2 else {"rank": rank, "residuals": {"a": numbers, "b": {"c": numbers.bfloat16()}}}


def gather(rank: int, size: int, chunk: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "CHUNK", chunk)
        return gathered.gather_states(own_state(rank), torch.device("cpu"))


@pytest.mark.parametrize("chunk", [1000, 1 << 24])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_rank_has_all_states(size: int, chunk: int, worlds: dict[int, World]) -> None:
    first, *others = worlds[size].run(gather, chunk=chunk)
    assert others == [[]] * (size - 1)
    assert len(first) == size
    for rank, state in enumerate(first):
        if rank == 2:
            assert state is None
            continue
        expected = own_state(rank)
        assert expected is not None
        assert state["rank"] == rank
        assert torch.equal(state["residuals"]["a"], expected["residuals"]["a"])
        assert torch.equal(state["residuals"]["b"]["c"], expected["residuals"]["b"]["c"])
