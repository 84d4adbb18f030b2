"""``sparsync``: the command line."""
