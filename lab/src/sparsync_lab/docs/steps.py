"""What the hook adds to a training step, and what of it is tested on a GPU."""

from __future__ import annotations

import re
from collections.abc import Collection

from sparsync_lab.docs.sources import Sources, table

MODELS = {"resnet50": "ResNet-50", "gpt2": "GPT-2 small"}
PARTS = ("compress", "exchange", "decode")


def on_cpus(sources: Sources) -> str:
    """Return a table of step times on CPUs."""
    lines = sources.lines("bench-step-cpu.csv")
    first = lines[0]
    rows = [
        [
            line["method"],
            line["scope"] or "–",
            f"{float(line['step_p50_ms']):.1f} ({float(line['step_p20_ms']):.1f}–{float(line['step_p80_ms']):.1f})",
            f"{float(line['ratio_to_plain_ddp']):.2f}",
            *("–" if line is first else f"{float(line[f'{part}_ms']):.1f}" for part in PARTS),
            f"{int(line['sent_bytes']):,}",
        ]
        for line in lines
    ]
    headings = ["method", "scope", "step ms, median (p20–p80)", "ratio to plain DDP", *(f"{part} ms" for part in PARTS)]
    return "\n\n".join(
        [
            table([*headings, "bytes sent"], rows),
            f"{sources.made('bench-step-cpu.csv', first, 'make bench')} An MLP of {int(first['parameters']):,} "
            f"parameters, {first['workers']} workers, density 0.001 (`balanced` 0.05), methods interleaved in one run "
            f"of {first['rounds']} rounds.",
        ]
    )


def on_a_gpu(sources: Sources) -> str:
    """Return tables of step times on a GPU: the newest, with AdamW, and of methods that were measured before."""
    newest, before = "bench-step-gpu.csv", "bench-step-scopes-gpu.csv"
    known = {line["method"] for line in sources.lines(newest)} - {"plain DDP"}
    return "\n\n".join(
        [
            _gpu_table(sources, newest),
            "With AdamW:",
            _gpu_table(sources, "bench-step-adamw-gpu.csv"),
            "Not measured again since a step's kernels are replayed as CUDA graphs:",
            _gpu_table(sources, before, known),
        ]
    )


def _gpu_table(sources: Sources, name: str, but_for: Collection[str] = ()) -> str:
    lines = [line for line in sources.lines(name) if line["method"] not in but_for]
    sizes = {line["model"]: int(line["parameters"]) for line in lines}
    found = {
        (line["model"], line["method"]): (
            f"{float(line['step_p50_ms']):.1f} ({float(line['step_p20_ms']):.1f}–{float(line['step_p80_ms']):.1f})",
            f"{float(line['ratio_to_plain_ddp']):.2f}",
        )
        for line in lines
    }
    methods = dict.fromkeys(line["method"] for line in lines)
    headings = [f"{MODELS[model]}, {size:,} entries: ms (p20–p80)" for model, size in sizes.items()]
    rows = [[method, *(cell for model in sizes for cell in found[model, method])] for method in methods]
    adamw = " --optimizer adamw" if lines[0].get("optimizer") == "adamw" else ""
    command = f"sparsync bench step --device cuda{adamw} --rounds {lines[0]['rounds']}"
    return "\n\n".join(
        [
            table(["method", *(cell for heading in headings for cell in (heading, "ratio"))], rows),
            f"{sources.made(name, lines[0], command)} A single worker over NCCL, bf16 autocast; nothing travels.",
        ]
    )


def exchange(sources: Sources) -> str:
    """Return a table of what an exchange takes on a GPU with many workers."""
    name, stages = "bench-exchange-gpu.csv", ("pack", "add_up", "choose", "pack_sums", "mean")
    lines = sources.lines(name)
    rows = [
        [f"{int(line['entries']):,}", line["workers"], line["collective"], f"{int(line['sent']):,}"]
        + [f"{float(line[f'{stage}_ms']):.2f}" if line[f"{stage}_ms"] else "–" for stage in stages]
        + [f"{float(line['total_ms']):.2f}"]
        for line in lines
    ]
    headings = ["entries", "workers", "collective", "sent", *(stage.replace("_", " ") for stage in stages), "ms"]
    made = sources.made(name, lines[0], f"sparsync bench exchange --rounds {lines[0]['rounds']}")
    return f"{table(headings, rows)}\n\n{made}"


def gpu_tests(sources: Sources) -> str:
    """Return what the tests on a GPU, and the sanitizer, said."""
    tests, sanitizer = sources.text("test-gpu.txt"), sources.text("test-sanitizer.txt")
    faults = sum(int(count) for count in re.findall(r"SUMMARY: (\d+) (?:errors|hazards)", sanitizer))
    return "\n".join(
        [
            f"- {_counted(tests, 'passed'):,} tests passed, {_counted(tests, 'failed')} failed and "
            f"{_counted(tests, 'skipped')} were skipped: `make test-gpu`, {_header(tests)} "
            f"({sources.linked('test-gpu.txt')}).",
            f"- NVIDIA's compute-sanitizer found {faults} errors and hazards in {_counted(sanitizer, 'passed')} runs "
            f"of the kernels' tests under memcheck and racecheck: `make test-sanitizer`, {_header(sanitizer)} "
            f"({sources.linked('test-sanitizer.txt')}).",
        ]
    )


def _counted(text: str, outcome: str) -> int:
    """Return the sum over the last lines of every test session."""
    sessions = re.findall(r"^.*\bin \d+\.\d+s.*$", text, re.MULTILINE)
    return sum(int(count) for session in sessions for count in re.findall(rf"(\d+) {outcome}\b", session))


def _header(text: str) -> str:
    return text.partition("\n")[0]
