"""``python -m sparsync``: the command line."""

from sparsync.cli import main

if __name__ == "__main__":
    main()
