"""``sparsync``: the command line. Needs the extra ``cli``; the demo's data need ``lab``."""

import sys


def main() -> None:
    """Run the command line; exit code 2 and one sentence for whatever the user can put right."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("sparsync: the command line needs more packages: pip install 'sparsync[cli]'", file=sys.stderr)
        sys.exit(2)
    from sparsync.cli.app import run

    sys.exit(run(sys.argv[1:]))
