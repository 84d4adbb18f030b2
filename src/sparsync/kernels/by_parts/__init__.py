"""Messages of whole vectors, cut in a part for each rank. ``collectives/by_parts.py`` is the specification."""
