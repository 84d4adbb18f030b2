"""Every message of the library's errors and warnings, read from its source, for the troubleshooting page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sparsync
from sparsync import errors
from sparsync.errors import SparsyncError
from sparsync_lab.docs.sources import Sources, plain

GAP = "…"  # what is put in when it is said
OWN = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SparsyncError))
REFUSED = ("ValueError", "TypeError", "ImportError")
WARNING = "warning"
WARNINGS = ("log.warning", "self._tell")
# Functions and constants whose text is said elsewhere, by the kind it is said as.
TOLD = {"announcement": WARNING, "momentum_notice": WARNING, "refusal": "ValueError", "SENTENCE": WARNING}
BODIES, RETURNED = ("body", "orelse", "finalbody", "handlers"), "return"
# Where a page says more about what a module refuses.
READ_ON = {
    "cli/plan": "planner.md",
    "planner/": "planner.md",
    "hosts/planning": "planner.md",
    "hosts/fsdp": "frameworks/fsdp.md",
    "hosts/checks/fsdp": "frameworks/fsdp.md",
    "hosts/lightning": "frameworks/lightning.md",
    "hosts/transformers": "frameworks/transformers.md",
    "hosts/accelerate": "frameworks/accelerate.md",
    "hosts/states/sharded": "frameworks/checkpoints.md",
    "hosts/states/rank_files": "frameworks/checkpoints.md",
    "engine/checkpoint": "guide.md#checkpoints",
    "feedback/residual": "guide.md#checkpoints",
    "feedback/second_moment": "guide.md#adam-and-adamw",
    "feedback/momentum": "guide.md#momentum",
    "feedback/optimizer_rules": "guide.md#adam-and-adamw",
    "feedback/taken_optimizer": "guide.md#adam-and-adamw",
    "local_steps/": "outer-loop.md",
    "hosts/survival": "guide.md#going-on-without-a-lost-rank",
    "engine/budget": "guide.md#byte-budgets",
    "config/budget": "guide.md#byte-budgets",
    "config/nodes": "guide.md#several-gpus-in-a-machine",
    "schedule": "guide.md#density-over-time",
    "collectives/": "methods.md#collectives",
    "compressors/": "methods.md#compressors",
    "wire/": "methods.md#values-and-indices",
    "simulate/": "reference/simulate.md",
    "theory": "reference/simulate.md#theory",
    "": "options.md",
}


@dataclass(frozen=True, order=True)
class Message:
    """A message: who says it, as what, and its text with gaps for what differs from time to time."""

    module: str
    kind: str
    text: str

    @property
    def known(self) -> bool:
        """Whether anything of the text is fixed; else it only carries another's."""
        return len(re.sub(rf"[\W{GAP}]+", "", self.text)) >= 8


@cache
def messages() -> tuple[Message, ...]:
    """Return the messages of the installed library, each once."""
    root, found = Path(sparsync.__file__).parent, set[Message]()
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    shared = {name: value for tree in trees.values() for name, value in _constants(tree).items()}
    for path, tree in trees.items():
        module = path.relative_to(root).with_suffix("").as_posix()
        said = _said(tree.body, {**shared, **_constants(tree)})
        found |= {Message(module, kind, text) for kind, text in said}
    return tuple(sorted(message for message in found if message.known))


def refused(sources: Sources) -> str:
    """Return what is refused, as sentences under the page that says more."""
    found: dict[str, set[str]] = {}
    for message in messages():
        if message.kind in REFUSED:
            page = next(page for part, page in READ_ON.items() if message.module.startswith(part))
            found.setdefault(page, set()).add(message.text)
    parts = []
    for page in dict.fromkeys(page for page in reversed(READ_ON.values()) if page in found):
        name = page.split("#")[-1].split("/")[-1].removesuffix(".md").replace("-", " ")
        lines = "\n".join(f"- {plain(text)}" for text in sorted(found[page], key=str.lower))
        parts.append(f"**More in [{name}]({page})**\n\n{lines}")
    return "\n\n".join(parts)


def _said(body: list[ast.stmt], names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what statements say, as what; ``names`` are the texts that names stand for, where that is known."""
    for statement in body:
        inner = [part for name in BODIES for part in getattr(statement, name, [])]
        inner = [part for one in inner for part in (one.body if isinstance(one, ast.ExceptHandler) else [one])]
        if inner:
            own = dict(names)
            if isinstance(statement, ast.FunctionDef) and statement.name in TOLD:
                own[RETURNED] = TOLD[statement.name]
            yield from _said(inner, own)
            names |= dict.fromkeys(_assigned(inner), GAP)  # which of them was met is not known
        else:
            yield from _calls(statement, names)
            if isinstance(statement, ast.Return) and statement.value is not None and RETURNED in names:
                yield names[RETURNED], _text(statement.value, names)
            for name in _assigned([statement]):
                names[name] = _text(statement.value, names)  # type: ignore[attr-defined]
                if name in TOLD:
                    yield TOLD[name], names[name]


def _calls(statement: ast.stmt, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            if name in (*OWN, *REFUSED):
                yield name, _text(node.args[0], names)
            elif name in WARNINGS:
                first = _text(node.args[0], names)
                yield WARNING, _text(node.args[1], names) if first == GAP and len(node.args) > 1 else first


def _assigned(body: list[ast.stmt]) -> list[str]:
    """Return the names that statements assign to."""
    nodes = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Assign))
    return [target.id for node in nodes for target in node.targets if isinstance(target, ast.Name)]


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts that a module's own names stand for."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return {name: _text(node.value, {}) for node in assigned for name in _assigned([node])}


def _text(node: ast.expr, names: dict[str, str]) -> str:
    """Return a text with gaps where it is not fixed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w*\}|%[sd]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (_text(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, GAP)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _text(node.func.value, names)
    return GAP
