"""``python -m sparsync_lab``: every command, also where nothing is installed and the source is on the path."""

import sys

from sparsync_lab.cli.app import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
