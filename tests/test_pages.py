"""Every code block of docs/: Python runs, commands are those that exist; every picture and method has its place."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import sparsync
from sparsync.cli.plan import make_parser
from sparsync.config.registry import COLLECTIVES, COMPRESSORS
from sparsync_lab.cli.commands import app
from sparsync_lab.cli.plan import models
from sparsync_lab.docs.charts import CHARTS
from sparsync_lab.docs.drawings import DRAWINGS
from sparsync_lab.docs.pictures import PLACE
from tests.page_blocks import PAGES, PROGRAM, ROOT, SETUPS, blocks_of, case_each_by_itself, case_together
from tests.world import World, run_forked

DOCS = [page for page in PAGES if page != "README.md"]
RAY = "docs/frameworks/ray.md"  # starts processes of its own: tests/frameworks/test_ray.py runs it
FRAMEWORKS = ("docs/frameworks/transformers.md", "docs/frameworks/lightning.md")  # take long to import
SLOW = pytest.mark.slow  # tests/frameworks guards the same lines
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def python_of(page: str) -> list[str]:
    """Return the blocks of a page that are run in its own processes."""
    return [block.code for block in blocks_of(page, "python") if block.why is None and PROGRAM not in block.code]


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    """One rank, for the blocks of most pages."""
    started = World(1)
    yield started
    started.close()


@pytest.mark.parametrize("page", [page for page in DOCS if page not in (*SETUPS, RAY) and python_of(page)])
def test_blocks_of_a_page_run(alone: World, page: str, tmp_path: Path) -> None:
    alone.run(case_each_by_itself, folder=str(tmp_path), blocks=python_of(page))


@pytest.mark.parametrize("page", [pytest.param(page, marks=SLOW if page in FRAMEWORKS else ()) for page in SETUPS])
def test_blocks_of_a_framework_run_on_two_ranks(page: str, tmp_path: Path) -> None:
    if Path(page).stem in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(Path(page).stem)
    outcomes = World.once(2, case_together, folder=str(tmp_path), blocks=python_of(page), setup=page)
    assert outcomes == [(True, None)] * 2, outcomes


@pytest.mark.parametrize("page", [page for page in DOCS if any(PROGRAM in b.code for b in blocks_of(page, "python"))])
def test_programs_of_a_page_run_and_say_what_it_shows(page: str) -> None:
    (program,) = (block.code for block in blocks_of(page, "python") if PROGRAM in block.code)
    (shown,) = (block.code for block in blocks_of(page, "text"))
    first, second = run_forked(program, 2)
    assert first.split("\n", 1)[1] == shown.split("\n", 1)[1]  # after the line with the version
    assert second == ""


def test_every_block_is_run() -> None:
    assert [page for page in PAGES if any(block.why is not None for block in blocks_of(page, "python"))] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "sh")])
def test_commands_of_a_page_exist(page: str) -> None:
    for block in blocks_of(page, "sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for command in _split(words):
                _check(command, page)


def _split(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _check(words: list[str], page: str) -> None:
    """Refuse a command of ours, or of torchrun, pip and make, that would not be taken."""
    if words[0] == "sudo":
        words = words[1:]
    name, *rest = words
    if name == "torchrun":
        while rest[0].startswith("--"):
            rest = rest[1:] if "=" in rest[0] or rest[0] == "--standalone" else rest[2:]
        if rest[0] != "-m":
            known = (ROOT / rest[0]).is_file() or f"`{rest[0]}`" in TEXT[page]
            assert known, f"{rest[0]}: no such file, and the page does not say to make it"
            return
        name, rest = rest[1], rest[2:]
    if name in ("sparsync", "sparsync_lab"):
        _parse(rest)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(rest) <= set(targets), rest
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        assert rest[0] == "install"
        assert set(re.findall(r"sparsync\[(\w+)\]", " ".join(rest))) <= set(extras), rest
    elif name in ("python", "python3"):
        assert rest[0] == "-m" or (ROOT / rest[0]).is_file(), rest
    else:
        assert name in (".", "nvidia-cuda-mps-control", "echo"), name


def _parse(arguments: list[str]) -> None:
    """Parse a command line of ours as far as it goes before anything is done."""
    if arguments[0] == "plan":
        make_parser(models()).parse_args(arguments[1:])
        return
    command: Any = typer.main.get_command(app)
    context = None
    name = "sparsync"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not isinstance(command, click.Group) and not hasattr(command, "resolve_command"):
            return
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "toml") or blocks_of(page, "diff")])
def test_other_blocks_are_what_they_say(page: str) -> None:
    for block in blocks_of(page, "toml"):
        assert tomllib.loads(block.code)
    for block in blocks_of(page, "diff"):
        ast.parse("\n".join(line[2:] for line in block.code.splitlines()))


def test_no_block_of_another_kind_is_on_a_page() -> None:
    kinds = {kind for text in TEXT.values() for kind in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert kinds <= {"python", "sh", "toml", "diff", "text"}


def test_every_page_is_listed_in_the_site() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert {f"docs/{page}" for page in listed} == {*DOCS, "docs/contributing.md", "docs/changelog.md"}


def test_everything_public_is_in_the_reference() -> None:
    named = {
        name for page in DOCS if "/reference/" in page for name in re.findall(r"^::: sparsync\.(\w+)", TEXT[page], re.M)
    }
    public = {name for name in sparsync.__all__ if not hasattr(sparsync.errors, name)} - {"RECIPES", "__version__"}
    assert public <= named


def test_every_method_has_a_page_with_formula_cost_and_source() -> None:
    for folder, methods in {"compressors": COMPRESSORS, "collectives": COLLECTIVES}.items():
        for name in methods:
            text = TEXT[f"docs/{folder}/{name}.md"]
            assert all(part in text for part in ("$$", "## What it costs", "**Source**", "```python")), name


def test_every_picture_is_on_a_page() -> None:
    shown = {name for text in TEXT.values() for name in re.findall(r"pictures/([\w-]+)\.svg\)", text)}
    assert shown == {*CHARTS, *DRAWINGS} == {path.stem for path in (ROOT / PLACE).iterdir()}
