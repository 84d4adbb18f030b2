"""Which code a result was made with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sparsync_lab import environment as where


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_says_whether_files_differ_from_it_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, package = tmp_path / "library", tmp_path / "package"
    for folder in (library, package):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "version.py").write_text("")
    monkeypatch.setattr(where, "__file__", str(package / "environment.py"))
    monkeypatch.setattr(where.sparsync, "__file__", str(library / "__init__.py"))
    git(tmp_path, "init")
    assert where.environment()["commit"] == ""  # not in it yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = where.environment()["commit"]
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "elsewhere").write_text("")
    assert where.environment()["commit"] == commit
    seen = set()
    for text in ("a = 1", "a = 2"):
        (package / "version.py").write_text(text)
        seen.add(where.environment()["commit"])
    (package / "version.py").write_text("")
    (library / "new.py").write_text("")
    seen.add(where.environment()["commit"])
    assert len(seen) == 3
    assert all(re.fullmatch(rf"{commit}\+[0-9a-f]{{8}}", one) for one in seen)
