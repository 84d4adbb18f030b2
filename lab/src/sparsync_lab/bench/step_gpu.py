"""What the hook adds to a training step on one GPU, against plain DDP, measured side by side in one run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.models.gpt import GPT
from sparsync_lab.models.imagenet import imagenet

PLAIN = "plain DDP"
# (name, what attach is asked for); plain DDP first: the others are compared with it.
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    (PLAIN, {}),
    ("none", {"compressor": "none"}),
    (
        "recipe default",
        {"recipe": "default", "density": 0.00625, "momentum": "move"},
    ),  # as for 16 workers
    ("recipe balanced", {"recipe": "balanced"}),
    ("threshold, layer", {"compressor": "threshold", "scope": "layer", "density": 0.001}),
    ("threshold, bucket", {"compressor": "threshold", "scope": "bucket", "density": 0.001}),
    ("topk, layer", {"compressor": "topk", "scope": "layer", "density": 0.001}),
    ("gaussian, layer", {"compressor": "gaussian", "scope": "layer", "density": 0.001}),
)
MODELS = ("resnet50", "gpt2")
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
WARM_UP = 25  # rounds that are not counted
BATCH = {"resnet50": 64, "gpt2": 8}
CONTEXT, WORDS = 1024, 50_257


@dataclass
class GpuStepRow:
    """One method's figures; times are milliseconds on the device, ``host`` what a step kept the host."""

    model: str
    method: str
    parameters: int
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    sent_bytes: int = 0

    def quantiles(self) -> tuple[float, float, float]:
        low, median, high = np.percentile(self.times, [20, 50, 80]).tolist()
        return low, median, high


class GpuTimedMethod:
    """A method and its model, timed step by step on a GPU."""

    def __init__(self, model: str, method: str, options: dict[str, object], optimizer: str) -> None:
        torch.manual_seed(0)
        self.kind = model
        net = (imagenet("resnet50") if model == "resnet50" else GPT(WORDS, 12, 768, 12, CONTEXT)).cuda()
        if model == "resnet50":
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.row = GpuStepRow(model, method, sum(p.numel() for p in net.parameters()))
        self.ddp = DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=True)
        self.optimizer = OPTIMIZERS[optimizer](self.ddp.parameters(), lr=1e-3)  # type: ignore[call-arg]
        self.sync = None
        if method != PLAIN:
            if optimizer != "sgd":
                options = {name: value for name, value in options.items() if name != "momentum"}
            self.sync = sparsync.attach(self.ddp, optimizer=self.optimizer, **options)  # type: ignore[arg-type]

    def step(self, x: Tensor, y: Tensor, counted: bool) -> None:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        first.record()
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = self.ddp(x)
        nn.functional.cross_entropy(out.float().view(-1, out.shape[-1]), y.view(-1)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        host = 1e3 * (time.perf_counter() - begun)
        last.record()
        last.synchronize()
        if counted:
            self.row.times.append(first.elapsed_time(last))
            self.row.host.append(host)

    def close(self) -> GpuStepRow:
        if self.sync is not None:
            tally = self.sync.stats().total
            self.row.sent_bytes = tally.bytes // tally.steps
            self.sync.detach()
        return self.row


@contextmanager
def single_process_group() -> Iterator[None]:
    """Join a group of one process, over NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def measure(
    model: str, rounds: int, methods: Sequence[str], optimizer: str, progress: Callable[[int], None]
) -> list[GpuStepRow]:
    """Time all ``methods`` (none given: every one of ``CASES``) and plain DDP in turn, a step each, round after round;
    who goes first changes with the round."""
    unknown = set(methods) - {name for name, _ in CASES}
    if unknown:
        known = ", ".join(name for name, _ in CASES)
        raise ValueError(f"method must be one of {known}, got {', '.join(sorted(unknown))}")
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU here")
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    with single_process_group():
        wanted = [case for case in CASES if not methods or case[0] in (PLAIN, *methods)]
        timed = [GpuTimedMethod(model, method, options, optimizer) for method, options in wanted]
        x, y = _batch(model)
        for turn in range(WARM_UP + rounds):
            start = turn % len(timed)
            for method_timer in timed[start:] + timed[:start]:
                method_timer.step(x, y, turn >= WARM_UP)
            progress(1)
        rows = [method_timer.close() for method_timer in timed]
        del timed, method_timer
    return rows


def _batch(model: str) -> tuple[Tensor, Tensor]:
    number = BATCH[model]
    if model == "resnet50":
        x = torch.randn(number, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        return x, torch.randint(1000, (number,), device="cuda")
    return torch.randint(WORDS, (number, CONTEXT), device="cuda"), torch.randint(
        WORDS, (number, CONTEXT), device="cuda"
    )
