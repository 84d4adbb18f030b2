"""Select by a threshold from a random sample, as Deep Gradient Compression does."""
