"""What loggers and profilers are given, on real processes; the lines are those of the documentation."""

from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import sparsync
from sparsync.engine.stats import Stats
from tests.models import loss_of, net
from tests.page_blocks import Writer

PAGE = Path(__file__).parents[1] / "docs/frameworks/loggers.md"
RANGES = ["sparsync/compress", "sparsync/decode", "sparsync/exchange"]


def test_a_warning_names_the_library_where_nobody_formats_it() -> None:
    warn = "logging.getLogger('sparsync').warning('100 %% of %s', 'it')"
    code = f"import logging, sparsync; {warn}; logging.basicConfig(); {warn}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["sparsync: 100 % of it", "WARNING:sparsync:100 % of it"]


def lines() -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "as_dict" in block]


def case_logged(rank: int, size: int, options: dict[str, Any], code: list[str]) -> tuple[list[Any], list[str]]:
    """Train two steps, log and profile the second; return the rows of each logger, and the ranges that were seen."""
    from torch._C._profiler import _ExperimentalConfig

    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(ddp.parameters()) if options.get("recipe") else None
    sync = sparsync.attach(ddp, optimizer=optimizer, **options)
    loss_of(ddp, rank, 0).backward()
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        loss_of(ddp, rank, 1).backward()
    rows = []
    for line in code:
        writer = Writer()
        exec(line, {"sync": sync, "wandb": writer, "writer": writer, "step": 1})
        rows.append(writer.rows)
    seen = sorted({event.key for event in profiler.key_averages() if event.key.startswith("sparsync/")})
    sync.detach()
    del ddp
    gc.collect()
    return rows, seen


@pytest.mark.parametrize(
    "options", [{"compressor": "topk", "density": 0.05}, {"recipe": "default"}, {"compressor": "topk", "per_node": 2}]
)
def test_a_step_is_logged_in_one_line_and_profiled_in_three_ranges(worlds: Any, options: dict[str, Any]) -> None:
    code = lines()
    assert len(code) == 2
    for rank, ((first, second), seen) in enumerate(worlds[2].run(case_logged, options=options, code=code)):
        assert first == second
        figures = {name: value for name, value, _ in first}
        assert {step for *_, step in first} == {1}
        assert all(type(value) is float and math.isfinite(value) for value in figures.values())
        assert {*figures} >= {f"sparsync/{name}" for name in ("bytes", "entries", "density", "compress_ms")}
        assert figures["sparsync/total_steps"] == 2
        assert figures["sparsync/bytes"] > 0
        led = rank and "per_node" in options  # and has nothing to compress
        assert seen == (RANGES[1:] if led else RANGES)


def test_every_name_of_the_page_is_there_and_none_is_left_out() -> None:
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = [name for line in table for name in re.findall(r"`([\w/]+)`", line.split("|")[1])]
    stats = Stats()
    stats.step.entries = stats.step.numel = 1  # where nothing was measured there is no share of the energy
    assert {f"sparsync/{name.removeprefix('sparsync/')}" for name in named} == {*stats.as_dict()}
    assert "density" in stats.as_dict(prefix="")
    stats.step.numel = 2
    assert "sparsync/energy_share" not in stats.as_dict()


def test_tensorboard_itself_takes_the_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    class Sync:
        stats = staticmethod(Stats)

    writer = SummaryWriter(str(tmp_path))  # type: ignore[no-untyped-call]
    exec(lines()[1], {"sync": Sync, "writer": writer, "step": 3})
    writer.close()  # type: ignore[no-untyped-call]
    assert any(tmp_path.iterdir())
