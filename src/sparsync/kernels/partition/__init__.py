"""Who owns which entries of a gradient that is summed in parts. ``collectives/partition.py`` is the specification."""

MIXER = 0x9E3779B1  # odd, with bits all over: neighbouring rows get owners that have nothing to do with each other
SHIFT = 15
