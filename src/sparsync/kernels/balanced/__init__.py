"""Messages to and from the owners of a gradient's parts, and the largest of their sums.

``collectives/partition.py`` and ``wire`` are the specification.
"""
