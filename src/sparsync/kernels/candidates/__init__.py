"""Collect the entries above a carried threshold in the one pass that adds the gradient: top-k, threshold and DGC choose
among them."""
