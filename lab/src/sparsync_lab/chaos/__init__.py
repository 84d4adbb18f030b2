"""Chaos: real processes train while faults, restarts and changes of every kind happen to them, and the laws are checked
by a ledger that shares no code with the library."""
