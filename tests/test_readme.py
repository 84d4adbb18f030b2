"""README and docs/: their numbers are those of results/, their links lead somewhere; the README's example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync_lab.docs.__main__ import main
from sparsync_lab.docs.blocks import BLOCKS, MARKED, fill
from sparsync_lab.docs.pictures import PLACE
from tests.page_blocks import PAGES, ROOT, blocks_of
from tests.world import run_forked

LIMIT = 300
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(((?!https?://)[^)#]*\.md)?#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def test_the_example_of_the_readme_runs() -> None:
    (block,) = blocks_of("README.md", "python")
    shown, nothing = run_forked(block.code, 2)
    assert "ThresholdK" in shown
    assert re.search(r"sent \d+\.\d% of all entries", shown)
    assert nothing == ""


@pytest.mark.slow
def test_the_example_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    (block,) = blocks_of("README.md", "python")
    (tmp_path / "example.py").write_text(block.code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "ThresholdK" in done.stdout
    assert re.search(r"sent \d+\.\d% of all entries", done.stdout)


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
    (tmp_path / "docs/site.css").symlink_to(ROOT / "docs/site.css")
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        text = (ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(MARKED.sub(r"<!-- generated: \g<name> -->\n1234\n<!-- end -->", text))
    main(["--root", str(tmp_path)])
    assert "results.md written" in capsys.readouterr().out
    for name in (*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / PLACE).iterdir())):
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8"), name


def test_a_block_that_nobody_writes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/a.md: block must be one of gains, .*, got 'gians'"):
        fill("<!-- generated: gians -->\n<!-- end -->", ROOT / "results", Path("docs/a.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page: str) -> None:
    for file, anchor in ANCHOR.findall((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / file if file else ROOT / page
        headings = HEADING.findall(target.read_text(encoding="utf-8"))
        assert anchor in {_anchor(heading) for heading in headings}, f"{file}#{anchor}"


def _anchor(heading: str) -> str:
    """Return the name that a page's reader gives to a heading."""
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return "".join(sign for sign in shown if sign.isalnum() or sign in " -_").strip().replace(" ", "-")


def test_results_are_small() -> None:
    """They travel with every clone."""
    assert sum(path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()) < 14e6
