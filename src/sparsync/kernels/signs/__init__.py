"""Round values to signs of one scale: loops for what ``wire/values.py`` specifies."""
