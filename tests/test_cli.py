"""The command line, run as a user runs it."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import sparsync as sparsync_package
from sparsync import cli
from sparsync.cli import main
from sparsync_lab.cli.app import run
from sparsync_lab.cli.bench_output import bench_file
from tests.world import fork_server

ROOT = Path(__file__).parent.parent
LIMIT = 240  # seconds, for a command that hangs; a machine may be busy
SPARSYNC = [sys.executable, "-c", "from sparsync.cli import main; main()"]


def sparsync(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run([*SPARSYNC, *arguments], cwd=cwd, env=wide, capture_output=True, text=True, timeout=LIMIT)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "compare", "train", "bench", "info", "plan"):
        assert re.search(rf"^\s+{command}\s", shown, re.MULTILINE)


def test_help_groups_commands_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    parts = re.split(r"^(\S.*):$", shown, flags=re.MULTILINE)
    found = {
        name: re.findall(r"^  (\w+) ", text, re.MULTILINE) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert found["For your training"] == ["plan", "info"]
    assert found["Measure the library, and make its published figures again"] == ["bench", "lab", "papers"]


def test_markup_takes_nothing_out_of_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsync.kernels.cpu.available", lambda: False)
    assert run(["info"]) == 0
    assert "plain PyTorch (pip install 'sparsync[fast]')" in capsys.readouterr().out


@pytest.mark.parametrize("out", [None, "some", "some/own.csv"])
def test_bench_writes_over_nothing_unless_it_is_told_to(
    out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = bench_file(None if out is None else Path(out), "bench-step-cpu.csv")
    assert path.parent.is_dir()
    if out is None:
        assert re.fullmatch(r"runs/bench/\d{4}-\d\d-\d\d-\d{6}/bench-step-cpu\.csv", path.as_posix())
    else:
        assert path.as_posix() == ("some/own.csv" if out.endswith(".csv") else "some/bench-step-cpu.csv")


def test_info_lists_versions_and_methods_and_needs_no_lab() -> None:
    ask = "print({'matplotlib', 'jinja2', 'sklearn'} & set(sys.modules))"
    code = f"import sys; from sparsync_lab.cli.app import run; code = run(['info']); {ask}; sys.exit(code)"
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], env=wide, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "set()"
    assert re.search(r"compressors\s+block, dgc, gaussian, none, random, threshold, topk, trimmed", done.stdout)
    assert re.search(r"collectives\s+allgather, balanced, dense, gtopk, shared", done.stdout)
    assert re.search(r"backends\s+.*gloo", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--workers", "0"], "workers must be from 1 to 42"),
        (["demo", "--workers", "many"], "--workers"),
        (["demo", "--steps", "0"], "steps must be 1 or more, got 0"),
        (["demo", "--seeds", "0"], "seeds must be 1 or more, got 0"),
        (["compare", "--density", "1.5"], "density must be above 0 and at most 1, got 1.5"),
        (["compare", "--density", "nan"], "density must be above 0 and at most 1, got nan"),
        (["demo", "--out", __file__], "File exists"),
        (["bench", "step", "--rounds", "0"], "rounds must be 1 or more, got 0"),
        (["bench", "step", "--workers", "0"], "workers must be from 1 to 64, got 0"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparsync: ")
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.slow
def test_bad_input_ends_the_process_with_code_2() -> None:
    done = sparsync("demo", "--workers", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["typer", "rich", "sklearn", "matplotlib", "jinja2"])
def test_a_missing_package_says_how_to_install_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith((f"{module}.", "sparsync_lab.cli."))]:
        monkeypatch.delitem(sys.modules, name)  # as in a new process
    monkeypatch.setitem(sys.modules, module, None)  # importing it now fails as if it were not installed
    monkeypatch.setattr(sys, "argv", ["sparsync", "demo"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"sparsync: {module} is missing: pip install sparsync-lab\n"


def test_the_library_needs_nothing_of_the_laboratory() -> None:
    code = "import sys, sparsync; print({'typer', 'rich', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.strip() == "set()"


# ---- with and without the laboratory --------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with packages that lie in ``tmp_path`` alone, without the metadata of anything installed."""
    needed = Path(torch.__file__).parent.parent
    wanted = {"torch", "torchgen", "numpy", "typing_extensions.py", "sympy", "mpmath", "functorch"}
    for entry in needed.iterdir():
        if entry.name in wanted or (entry.name.endswith(".libs") and entry.name.startswith(("torch", "numpy"))):
            (tmp_path / entry.name).symlink_to(entry)

    def run_bare(*words: str, also: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, [ROOT / "src", tmp_path, *also]))
        # -S: without site-packages; what is on the path is all there is.
        command = [sys.executable, "-S", *words]
        own = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
        return subprocess.run(
            command, env=own | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
        )

    return run_bare


def test_the_library_alone_has_its_own_commands(bare: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = bare("-m", "sparsync", "--version")
    assert (done.returncode, done.stdout) == (0, f"sparsync {sparsync_package.__version__}\n"), done.stderr
    commands = ["demo", "train", "compare", "papers", "bench", "nothing", "plan", "--help", "info"]
    ask = f"from sparsync.cli import run; print([run([command]) for command in {commands}])"
    done = bare("-c", ask)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2, 2, 2, 2, 0, 0]"
    assert done.stderr.splitlines() == [
        *(
            f"sparsync: '{command}' belongs to the laboratory, which is not installed: pip install sparsync-lab"
            for command in commands[:5]
        ),
        "sparsync: unknown arguments: nothing; sparsync --help lists the commands",
        "sparsync: either --model or --params must be given: "
        "sparsync plan --model resnet50 --workers 16 --bandwidth 10Gbit --compute 0.46s",
    ]
    assert "The laboratory adds demo, train, compare, papers and bench: pip install sparsync-lab" in done.stdout
    assert re.search(r"^recipes +default, ", done.stdout, re.MULTILINE)


def test_the_laboratory_needs_no_metadata(bare: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """``python -m sparsync_lab`` offers every command where only the source is on the path."""
    site = Path(torch.__file__).parent.parent
    also = [ROOT / "lab" / "src", site]
    nothing_installed = "import importlib.metadata as m, runpy, sys; m.entry_points = lambda **_: (); "
    start = f"{nothing_installed}runpy.run_module('sparsync_lab', run_name='__main__', alter_sys=True)"
    # Twice in one process: importing torch takes longer than anything else here.
    again = "sys.argv[1:] = ['demo', '--workers', '0']"
    twice = f"import contextlib\nwith contextlib.suppress(SystemExit):\n    {start}\n{again}\n{start}"
    done = bare("-c", twice, "--help", also=also)
    for command in ("demo", "compare", "train", "bench", "papers", "info"):
        assert re.search(rf"^\s+{command}\s", done.stdout, re.MULTILINE), done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "workers must be from 1 to 42" in done.stderr


def test_without_an_entry_point_a_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())
    assert cli.run(["demo"]) == 2
    said = capsys.readouterr().err
    assert said == "sparsync: 'demo' belongs to the laboratory, which is not installed: pip install sparsync-lab\n"


def test_demo_prints_a_table_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fork_server()  # the tests' own, which has all imported
    monkeypatch.setenv("COLUMNS", "200")
    capfd.readouterr()
    code = run(["demo", "--workers", "2", "--steps", "4", "--seeds", "1", "--out", str(tmp_path / "new")])
    shown, errors = capfd.readouterr()
    assert (code, errors) == (0, "")
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    for method in ("dense", "paper", "default", "topk 0.1 %", "random+shared 1 %", "topk+gtopk 1 %"):
        assert re.search(rf"^{re.escape(method)} ", shown, re.MULTILINE)
        assert f'<th scope="row">{method}' in page
    assert re.search(r"^dense .* 340,008 +1\.0 ×", shown, re.MULTILINE)  # 2 workers: 2(P-1)/P x 85,002 x 4 bytes
    for text in (shown, page):
        assert "This is a short training" in text
    assert shown.splitlines()[-1] == f"report: {tmp_path / 'new' / 'report.html'}"


def test_bench_step_does_not_time_sgd_for_another_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "step", "--optimizer", "adamw"]) == 2
    assert "optimizer adamw is timed on a GPU alone" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_step_writes_its_columns(tmp_path: Path) -> None:
    out = tmp_path / "bench.csv"
    done = sparsync("bench", "step", "--parameters", "20000", "--rounds", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "not what a slow network would gain" in done.stdout
    with out.open() as file:
        rows = list(csv.DictReader(file))
    methods = ["plain DDP", "none", "topk", "threshold", "threshold", "threshold", "recipe balanced"]
    assert [row["method"] for row in rows] == methods
    for key in ("step_p20_ms", "step_p50_ms", "step_p80_ms", "ratio_to_plain_ddp", "sent_bytes"):
        assert all(float(row[key]) > 0 for row in rows), key
    for key in ("compress_ms", "exchange_ms", "decode_ms"):
        assert all(float(row[key]) > 0 for row in rows[1:]), key
    for key in ("device", "cpus", "python", "torch", "sparsync", "date", "workers", "rounds", "asked_density"):
        assert all(row[key] for row in rows), key
    assert [float(row["asked_density"]) for row in rows] == [1.0, 1.0, 0.001, 0.001, 0.001, 0.001, 0.05]
    assert "commit" in rows[0]
    assert float(rows[2]["sent_bytes"]) < float(rows[0]["sent_bytes"]) / 10
