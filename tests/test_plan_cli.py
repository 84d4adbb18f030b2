"""``sparsync plan`` as a user runs it: with and without the laboratory, and on real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsync import SparsyncError, cli
from sparsync.cli.plan_script import TIMED, WARM_UP, Measured, PassWatch, run_script
from sparsync.planner import METHODS, ModelShape
from sparsync.planner.costs import cost_key
from sparsync.planner.stored_costs import CAST
from sparsync_lab.cli.app import run
from sparsync_lab.cli.plan import models

LIMIT = 300  # seconds, for a command that hangs; a machine may be busy
GIVEN = ["--workers", "16", "--bandwidth", "1Gbit", "--compute", "0.46s"]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    """A file of costs, as another machine would have measured them."""
    tensors = ModelShape.of_size(1000).tensors
    plans = [METHODS[name].plan(ModelShape.named("resnet50").tensors, workers, optimizer)
             for name in METHODS for workers in (2, 3, 16, 10_000) for optimizer in ("sgd", "adamw")]  # fmt: skip
    plans += [METHODS[name].plan(tensors, 2, "sgd") for name in METHODS]
    known = {cost_key(plan): [[1e-3, 1e-10, 0, 0], [1e-3, 1e-10, 1e-10, 0]] for plan in plans}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"cuda of another machine": {**known, CAST: [[0] * 4, [1e-5, 1e-11, 0, 0]]}}))
    return path


def test_the_table_has_every_method_and_says_what_to_do(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "resnet50", *GIVEN, "--costs", str(costs)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("resnet50: 25,557,032 parameters in 5 buckets; 16 workers, 1 Gbit/s, 50 µs a message; ")
    for name in METHODS:
        assert re.search(rf"^{re.escape(name)} +[0-9.]+ m?s +[0-9.]+ % +[0-9.]+ × ", shown, re.MULTILINE), name
    assert re.search(r"^Best: expect [0-9.]+ × with `default`: .* because it sends ", shown, re.MULTILINE)
    assert re.search(r"^Above [0-9.]+ Gbit/s no sparse method pays\.$", shown, re.MULTILINE)
    assert "measured on cuda of another machine" in shown


def test_sizes_machines_optimizers_and_plots(costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "new" / "plan.png"
    words = ["--params", "25.6M", "--nodes", "4", "--per-node", "4", "--bandwidth", "1.2GB/s", "--compute", "460ms"]
    more = ["--optimizer", "adamw", "--latency", "20us", "--local-bandwidth", "300Gbit", "--trees", "--plot", str(plot)]
    assert run(["plan", *words, *more, "--costs", str(costs)]) == 0
    shown = capsys.readouterr().out
    assert "25,600,000 parameters" in shown
    assert "16 workers in 4 machines, 9.6 Gbit/s, 20 µs a message" in shown
    assert shown.splitlines()[-1] == f"plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "either --model or --params must be given"),
        (["--model", "resnet50", "--params", "1e6", *GIVEN], "either --model or --params must be given"),
        (["--model", "resnet", *GIVEN], "model must be one of alexnet"),
        (["--model", "resnet50"], "--bandwidth and --compute must be given"),
        (["--model", "resnet50", "--bandwidth", "1Gbit", "--compute", "1"], "--workers must be given"),
        (["--params", "many", *GIVEN], "params must be a number such as 124e6"),
        (["--params", "0", *GIVEN], "params must be a number"),
        (["--params", "1e6", *GIVEN, "--bandwidth", "10Gbut"], "bandwidth must be a rate such as 10Gbit"),
        (["--params", "1e6", *GIVEN, "--compute", "fast"], "compute must be a time such as 0.46s"),
        (["--params", "1e6", *GIVEN, "--latency", "50mm"], "latency must be a time"),
        (["--params", "1e6", *GIVEN, "--workers", "0"], "workers must be a whole number, 1 or more, got 0"),
        (["--params", "1e6", *GIVEN, "--workers", "x"], "--workers: invalid int value"),
        (["--params", "1e6", *GIVEN, "--nodes", "3", "--per-node", "2"], "nodes times per-node, 6, got 16"),
        (["--params", "1e6", *GIVEN, "--per-node", "0"], "per-node must be 1 or more, got 0"),
        (["--params", "1e6", *GIVEN, "--per-node", "3"], "per_node=3 does not divide 16 ranks"),
        (["--params", "1e6", *GIVEN, "--every", "0"], "every must be a whole number of local steps, 1 or more, got 0"),
        (["--params", "1e6", *GIVEN, "--optimizer", "lion"], "optimizer must be one of sgd, adam, adamw, got 'lion'"),
        (["--params", "1e6", *GIVEN, "--device", "tpu"], "device must be"),
        (["--params", "1e6", *GIVEN, "--costs", "none.json"], "there is none at none.json"),
        (["--params", "1e6", *GIVEN, "--fast"], "unrecognized arguments: --fast; see sparsync plan --help"),
        (["--params", "1e6", "--measure"], "--measure needs processes: torchrun"),
        (["--measure", "--script", "train.py"], "--script needs --measure and processes: torchrun"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(cli, "entry_points", lambda group: ())
        assert (cli.run if alone else run)(["plan", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("sparsync: ")
        assert sentence in said
        assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--params", "1e6", "--measure"], "--compute must be given: of this model nobody can be asked"),
        (
            ["--params", "1e6", "--measure", "--script", "train.py"],
            "--script says by itself what --model, --params and",
        ),
        (["--measure", "--script", "none.py"], "script must be a Python file, got 'none.py'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert run(["plan", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_an_error_of_the_library_in_a_script_is_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sparsync\nraise sparsync.SparsyncError('of the script')")
    with pytest.raises(SparsyncError, match="of the script"):
        run_script(script, [], lambda *_: None)


def test_a_script_ends_once_enough_steps_were_timed() -> None:
    told: list[float] = []
    watch, model = PassWatch(lambda _, seconds: told.append(seconds)), torch.nn.Linear(1, 1)
    model.require_backward_grad_sync = True
    for _ in range(WARM_UP + TIMED):
        watch(model)
    assert told == []
    with pytest.raises(Measured):
        watch(model)
    assert len(told) == 1


def test_without_the_laboratory_there_are_plans_and_no_plots(
    costs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    words = ["plan", "--model", "resnet50", *GIVEN, "--costs", str(costs)]
    assert cli.run(words) == 0
    assert "Best: expect " in capsys.readouterr().out
    assert cli.run([*words, "--plot", "plan.png"]) == 2
    assert "--plot needs the laboratory, which is not installed: pip install sparsync-lab" in capsys.readouterr().err
    assert cli.run(["plan", "--help"]) == 0
    assert "--bandwidth" in capsys.readouterr().out


def test_help_goes_to_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--per-node" in shown
    assert "lstm-ptb" in shown


def test_the_laboratorys_models_have_names_too() -> None:
    known = models()
    assert ModelShape.named("resnet20", known).numel == 269_722
    assert ModelShape.named("gpt2", known).numel == 124_439_808
    with torch.device("meta"):
        from sparsync_lab.models.catalogue import build

        shapes = sorted(tuple(p.shape) for p in build("gpt2").parameters())
    # Linear layers are stored the other way round than GPT-2's own.
    assert sorted(tuple(sorted(shape)) for shape in shapes) == sorted(
        tuple(sorted(tensor.shape)) for tensor in known["gpt2"]()
    )


# ---- measured on processes ------------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., list[str]]:
    def start(workers: int, *arguments: str) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *launch, "-m", "sparsync", "plan", "--measure", *arguments],
            env=environment, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return start


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_network_is_measured_and_one_sentence_says_what_to_expect(
    torchrun: Callable[..., list[str]], costs: Path, workers: int
) -> None:
    lines = torchrun(workers, "--model", "resnet50", "--compute", "1s", "--costs", str(costs))
    assert sum(line.startswith("resnet50: ") for line in lines) == 1  # the first rank's alone
    assert f"; {workers} workers, " in lines[0]
    assert sum("expect " in line or "don't: " in line for line in lines) == 1


@pytest.mark.slow
def test_network_passes_and_selection_are_measured_on_the_spot(
    torchrun: Callable[..., list[str]], tmp_path: Path
) -> None:
    lines = torchrun(2, "--model", "lenet5")
    assert lines[0].startswith("lenet5: 61,706 parameters in 1 bucket; 2 workers, ")
    assert sum("expect " in line or "don't: " in line for line in lines) == 1
    (known,) = json.loads((tmp_path / "sparsync" / "costs.json").read_text()).values()
    assert CAST in known
    assert all(cost >= 0 for parts in known.values() for part in parts for cost in part)


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "attached":
    import sparsync
    sparsync.attach(model, optimizer=optimizer)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
print("the script went on")
dist.destroy_process_group()
"""


FEW = "made no more than 11 steps: there is nothing to measure"
ATTACHED = "calls sparsync.attach, and is measured as it is without: leave that out"


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ("1000000", ""),
        pytest.param("5", FEW, marks=pytest.mark.slow),
        pytest.param("attached", ATTACHED, marks=pytest.mark.slow, id="attached"),
    ],
)
def test_the_model_of_a_users_own_script_is_measured(costs: Path, tmp_path: Path, steps: str, refused: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sparsync", "plan"]
    words = ["--measure", "--costs", str(costs), "--script", str(script), steps]
    done = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True, timeout=LIMIT)
    if refused:
        assert refused in done.stderr
        assert "Traceback" not in done.stderr.split(refused)[0]
        return
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Linear: 60,200 parameters in 1 bucket; 2 workers, ")
    assert sum("expect " in line or "don't: " in line for line in lines) == 1
    assert "the script went on" not in done.stdout


@pytest.mark.slow
def test_a_model_that_nobody_can_time_needs_its_compute(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sparsync", "plan"]
    done = subprocess.run(
        [sys.executable, *launch, "--measure", "--params", "1e6"], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0
    assert "sparsync: --compute must be given: of this model nobody can be asked" in done.stderr
