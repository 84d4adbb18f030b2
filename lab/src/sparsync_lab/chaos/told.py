"""What a survivor of a fault is told: by the library, which names whom it happened to and what; or by torch, where an
exchange of its own has failed and the library had no part in it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join

import sparsync
from sparsync_lab.chaos.faults import RAISED
from sparsync_lab.chaos.schedule import Life

OURS = Path(sparsync.__file__).parent
TORCH = Path(torch.__file__).parent
EXCHANGES = Path(dist.__file__).parent
JOIN = Path(join.__file__)
DDP = Path(torch.nn.parallel.__file__).parent
# By which DDP asks, under join(), who has data and whose weights are the last ones. That of the gradients is not among
# them: it is the library's.
ASKS = frozenset(
    {"_get_num_nonjoined_procs", "notify_join_context", "_check_global_requires_backward_grad_sync",
     "_find_common_rank", "_sync_final_model", "_match_unused_params_allreduce"}
)  # fmt: skip
VOTES = "; steps "  # what the library adds of the committed step, which may name any rank
STORE_LOST = ("the store is gone", "the store does not answer")


def told_by_torch(error: Exception, sync: sparsync.Handle | None, joining: bool) -> bool:
    """Return whether an exchange of torch's own has failed that the library could not have known of: one that the
    ledger or a checkpoint has asked for, any of a detached model, or, under join alone, DDP's questions."""
    frames = [(Path(f.f_code.co_filename), f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, RuntimeError) or any(file.is_relative_to(OURS) for file, _ in frames):
        return False
    if sync is None:
        return frames[-1][0].is_relative_to(TORCH)
    of_ddp = [name for file, name in frames if file == JOIN or file.is_relative_to(DDP)]
    if not of_ddp:
        return frames[-1][0].is_relative_to(EXCHANGES)
    return joining and not ASKS.isdisjoint(of_ddp)


def names_the_cause(life: Life, error: str, left: Collection[int]) -> bool:
    """Return whether an error of the library, on a survivor, says what has happened, and to whom.

    Args:
        left: ranks that torch has told of it, who have left without a word: the others may miss these instead.
    """
    said, fault = error.partition(VOTES)[0], life.fault
    if fault.kind in ("raise in compress", "raise in exchange"):
        return re.search(rf"\brank {fault.rank}: (.*\W)?{RAISED}$", said) is not None
    suspects = {fault.rank, *left}
    if life.store_on_rank_0 and 0 in suspects and any(words in said for words in STORE_LOST):
        return True
    missing = re.search(r"ranks not heard from: ([\d, ]+)$", said)
    return missing is not None and not suspects.isdisjoint(map(int, missing[1].split(", ")))
