"""Send a gradient whole, in one pass over it. ``compressors/none.py`` is the reference."""
