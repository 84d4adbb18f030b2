"""The states of all ranks on the first of them, for frameworks in which that rank alone writes checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 24  # bytes of each rank that are on their way together


def to_cpu(value: Any) -> Any:
    """Return a state with all its tensors in the host's memory."""
    if isinstance(value, Mapping):
        return {key: to_cpu(inner) for key, inner in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def gather_states(state: Mapping[str, Any] | None, device: torch.device) -> list[Any]:
    """Return the states of all ranks, in their order, on the first rank, and none on the others; all call this.

    The first rank's host holds all states and, for the while, their bytes; its device a ``CHUNK`` of every rank.

    Args:
        state: of this rank: tensors and plain types; a rank may have none.
        device: from which the process group's backend sends.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [to_cpu(state)]
    file = BytesIO()
    torch.save(to_cpu(state), file)
    own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(one) for one in sizes]
    texts = [bytearray() for _ in lengths] if dist.get_rank() == 0 else []
    for start in range(0, max(lengths), CHUNK):
        sent = own.new_zeros(min(CHUNK, max(lengths) - start))
        part = own[start : start + CHUNK]
        sent[: part.numel()] = part
        sent = sent.to(device)
        room = [torch.empty_like(sent) for _ in texts]
        dist.gather(sent, room or None, dst=0)
        for text, row, length in zip(texts, room, lengths, strict=False):  # elsewhere there are no texts
            text += row[: max(0, length - start)].cpu().numpy().tobytes()
    states = []
    while texts:  # which are let go one after another
        states.append(torch.load(BytesIO(texts.pop(0)), weights_only=True))
    return states
