"""Run a command line of the laboratory; errors become one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # what shells give for Ctrl-C; the parser may have caught it before us


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code: 2 for whatever the user can put right."""
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sparsync"):
            raise
        return _report(f"{error.name.partition('.')[0]} is missing: pip install sparsync-lab", 2)
    except (ValueError, OSError) as error:
        return _report(str(error), 2)
    except Exception as error:
        # What the parser refuses knows how to say it; anything else is a fault of ours and shows itself.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _report(error.format_message(), error.exit_code)
        raise


def _run(arguments: Sequence[str]) -> int:
    import typer  # here, so that it is reported if it is missing

    from sparsync_lab.cli.commands import app

    try:
        code = int(app(list(arguments), standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    return _report("interrupted", code) if code == INTERRUPTED else code


def _report(sentence: str, code: int) -> int:
    print(f"sparsync: {sentence}", file=sys.stderr)
    return code
