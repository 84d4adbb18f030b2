"""The command line, run as a user runs it."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync.cli import main
from sparsync_lab.cli.app import run

ROOT = Path(__file__).parent.parent
LIMIT = 240  # seconds, for a command that hangs; a machine may be busy
SPARSYNC = [sys.executable, "-c", "from sparsync.cli import main; main()"]


def sparsync(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run([*SPARSYNC, *arguments], cwd=cwd, env=wide, capture_output=True, text=True, timeout=LIMIT)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "compare", "train", "bench", "info"):
        assert re.search(rf"^\s+{command}\s", shown, re.MULTILINE)


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


def test_bad_input_ends_the_process_with_code_2() -> None:
    done = sparsync("demo", "--workers", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "extra"),
    [("typer", "cli"), ("rich", "cli"), ("sklearn", "lab"), ("matplotlib", "lab"), ("jinja2", "lab")],
)
def test_a_missing_package_names_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it now fails as if it were not installed
    monkeypatch.setattr(sys, "argv", ["sparsync", "demo"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert f"pip install 'sparsync[{extra}]'" in said
    assert len(said.strip().splitlines()) == 1


def test_the_library_needs_none_of_the_extras() -> None:
    code = "import sys, sparsync; print({'typer', 'rich', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.strip() == "set()"


def test_demo_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    done = sparsync("demo", "--workers", "2", "--steps", "4", "--seeds", "1", "--out", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    for method in ("dense", "paper", "default", "topk 0.1 %", "random+shared 1 %", "topk+gtopk 1 %"):
        assert re.search(rf"^{re.escape(method)} ", done.stdout, re.MULTILINE)
        assert f'<th scope="row">{method}' in page
    assert re.search(r"^dense .* 340,008 +1\.0 ×", done.stdout, re.MULTILINE)  # 2 workers: 2(P-1)/P x 85,002 x 4 bytes
    for shown in (done.stdout, page):
        assert "This is a short training" in shown
    assert done.stdout.splitlines()[-1] == f"report: {tmp_path / 'new' / 'report.html'}"


def processes_of(session: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if not line.split()[1].startswith("Z")]


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
