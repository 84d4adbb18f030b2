"""``python -m sparsync.cli``: the form in which ``torchrun -m`` starts the command line."""

from sparsync.cli import main

if __name__ == "__main__":
    main()
