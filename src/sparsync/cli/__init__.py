"""``sparsync``: the command line. The laboratory adds its commands through an entry point, once it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from sparsync.cli.info import info
from sparsync.cli.plan import plan
from sparsync.version import __version__

GROUP = "sparsync.commands"
LAB_COMMANDS = ("demo", "train", "compare", "papers", "bench")
USAGE = """usage: sparsync [--version] [--help] info | plan

Sparse gradient communication for PyTorch.

  info    versions, devices, backends and the methods that can be named in attach()
  plan    how long a step of a model takes with each method: sparsync plan --help

The laboratory adds demo, train, compare, papers and bench: pip install sparsync-lab"""


def main() -> None:
    """Run the command line; exit code 2 and one sentence for whatever the user can put right."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    if list(arguments) == ["--version"]:
        print(f"sparsync {__version__}")
        return 0
    if list(arguments) == ["info"]:
        return info()
    extended = _plugin()
    if extended is not None:
        return extended(arguments)
    if arguments and arguments[0] == "plan":
        return _planned(arguments[1:])
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if arguments[0] in LAB_COMMANDS:
        sentence = f"'{arguments[0]}' belongs to the laboratory, which is not installed: pip install sparsync-lab"
    else:
        sentence = f"unknown arguments: {' '.join(arguments)}; sparsync --help lists the commands"
    print(f"sparsync: {sentence}", file=sys.stderr)
    return 2


def _planned(arguments: Sequence[str]) -> int:
    """Run ``plan``, whose errors become one sentence."""
    try:
        return plan(arguments)
    except (ValueError, OSError) as error:
        print(f"sparsync: {error}", file=sys.stderr)
        return 2


def _plugin() -> Callable[[Sequence[str]], int] | None:
    """Return the command line of the package that extends this one, if any is installed."""
    for point in entry_points(group=GROUP):
        loaded: Callable[[Sequence[str]], int] = point.load()
        return loaded
    return None
