"""README and docs/: their code runs, their numbers are those of results/, their links lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.docs.__main__ import main, pages
from sparsync_lab.docs.blocks import BLOCKS, MARKED, fill
from tests.world import World, run_forked

ROOT = Path(__file__).parent.parent
PAGES = [path.relative_to(ROOT).as_posix() for path in pages(ROOT)]
LIMIT = 300
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


def blocks_of(page: str) -> list[str]:
    """Return a page's blocks of Python."""
    return PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))


def test_the_example_of_the_readme_runs() -> None:
    (whole,) = blocks_of("README.md")
    shown, nothing = run_forked(whole, 2)
    assert "ThresholdK" in shown
    assert re.search(r"sent \d+\.\d% of all entries", shown)
    assert nothing == ""


@pytest.mark.slow
def test_the_example_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    (whole,) = blocks_of("README.md")
    (tmp_path / "example.py").write_text(whole)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "ThresholdK" in done.stdout
    assert re.search(r"sent \d+\.\d% of all entries", done.stdout)


def case_blocks(rank: int, size: int, folder: str, blocks: list[str]) -> None:
    """Run the blocks of a page in a folder, each with a model of its own."""
    os.chdir(folder)
    for number, code in enumerate(blocks):
        torch.manual_seed(number)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        loader = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(8)]
        names = {"contextlib": contextlib, "torch": torch, "dist": dist, "sparsync": sparsync, "ddp": ddp}
        names |= {"optimizer": optimizer, "loader": loader, "loss_fn": nn.functional.cross_entropy, "model": ddp.module}
        before = [p.detach().clone() for p in ddp.parameters()]
        exec(compile(code, f"block {number}", "exec"), names)
        trained = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert trained == ("optimizer.step()" in code or "scaler.step(" in code), code
        handle = names.get("sync", names.get("state"))
        if isinstance(handle, sparsync.Handle):
            handle.detach()
        del ddp, names


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md" and blocks_of(page)])
def test_the_code_of_the_pages_runs(page: str, tmp_path: Path) -> None:
    (outcome,) = World.once(1, case_blocks, folder=str(tmp_path), blocks=blocks_of(page))
    assert outcome == (True, None), outcome[1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_results(page: str) -> None:
    """If this fails: ``python -m sparsync_lab.docs``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end -->") == len(MARKED.findall(text))
    assert fill(text, ROOT / "results", Path(page)) == text


def test_every_block_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in MARKED.findall((ROOT / page).read_text(encoding="utf-8"))}
    assert shown == set(BLOCKS)


def test_a_page_that_is_out_of_date_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("results", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(MARKED.sub(r"<!-- generated: \g<name> -->\n1234\n<!-- end -->", text))
    main(["--root", str(tmp_path)])
    assert "results.md written" in capsys.readouterr().out
    for page in PAGES:
        assert (tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
    main(["--root", str(tmp_path)])
    assert not capsys.readouterr().out


def test_a_block_that_nobody_writes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/a.md: block must be one of gains, .*, got 'gians'"):
        fill("<!-- generated: gians -->\n<!-- end -->", ROOT / "results", Path("docs/a.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / link).exists(), link


def test_results_are_small() -> None:
    """All of the repository is to stay under 10 MB."""
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 8e6
