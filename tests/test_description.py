"""What ``describe()`` says first: in plain words, with the numbers that are then counted."""

from __future__ import annotations

import gc
import re
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def case_plain_words(rank: int, size: int, optimizer: str, options: dict[str, Any]) -> tuple[str, float, float]:
    """Attach, describe, make a step; return the words, and what was counted: the share of all entries, and bytes."""
    ddp = DistributedDataParallel(model())
    makers: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    given = {"optimizer": makers[optimizer](ddp.parameters(), lr=0.1)} if optimizer else {}
    sync = sparsync.attach(ddp, **given, **options)
    text = sync.describe()
    ddp(torch.randn(8, 64)).square().sum().backward()
    step = sync.stats().step
    sync.detach()
    del ddp
    gc.collect()
    return text, step.density, step.traffic


def test_the_first_lines_say_what_is_sent_how_much_less_and_what_was_changed(worlds: Any) -> None:
    for optimizer, options in (
        ("", {"compressor": "topk", "density": 0.05}),
        ("adamw", {"density": 0.05}),
        ("", {"compressor": "topk", "density": 0.05, "per_node": [[0, 1], [2]]}),
    ):
        text, density, traffic = worlds[3].run(case_plain_words, optimizer=optimizer, options=options)[0]
        title, what, how_much, changed, *details = text.splitlines()
        assert title == f"sparsync {sparsync.__version__} on 3 workers (gloo)"
        found = re.match(
            r"  About ([\d.]+) % of all entries are sent in a step: 5 % of those of (\d) tensors? \((.*?)\), and all "
            r"of the other (\d), which are small \((.*?)\)\. The rest is kept, and sent later\.$",
            what,
        )
        assert found, what
        assert int(found[2]) + int(found[4]) == 4
        assert "1 tensors" not in text
        assert int(found[3].replace(",", "")) + int(found[5].replace(",", "")) == 7510
        assert abs(float(found[1]) / 100 - density) < 0.1 * density
        found = re.match(
            r"  That is ([\d.]+) kB a step and (\w+), ([\d.]+) times less than the ([\d.]+) kB of a", how_much
        )
        assert found, how_much
        assert abs(1000 * float(found[1]) - traffic) < 0.01 * traffic
        machines = 2 if "per_node" in options else 3
        assert found[2] == ("machine" if "per_node" in options else "worker")
        whole = 2 * (machines - 1) / machines * 4 * 7510
        assert abs(float(found[4]) - whole / 1000) < 0.1
        assert abs(float(found[3]) - whole / traffic) < 0.02 * whole / traffic
        assert changed.startswith("  Changed: AdamW applies" if optimizer else "  Your optimizer is not changed.")
        assert [line.split()[0] for line in details[:3]] == ["recipe", "compressor", "collective"]


def test_a_budget_says_what_is_sent_on_average(worlds: Any) -> None:
    text, *_ = worlds[2].run(case_plain_words, optimizer="sgd", options={})[0]
    assert re.search(r"a step and worker now, and [\d.]+ k?B on average over 2,000 steps, \d\d times less than", text)


def test_every_entry_is_said_to_be_sent(worlds: Any) -> None:
    text, density, _ = worlds[2].run(case_plain_words, optimizer="", options={"compressor": "none"})[0]
    assert density == 1
    assert "  Every entry of the gradient is sent.\n" in text
    assert ", 1 times the 30 kB of a dense" in text
    alone, *_ = worlds[1].run(case_plain_words, optimizer="", options={"compressor": "topk"})[0]
    assert "There is nobody to send to" in alone
