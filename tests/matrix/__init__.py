"""The fault matrix: every fault, at every step of the protocol, of every collective.

``steps.py`` lists the steps, ``faults.py`` what can happen at one, ``cells.py`` which of their combinations there are,
``training.py`` what each rank does meanwhile, ``expected.py`` what has to come of it, ``run.py`` runs a cell on real
processes. ``python -m tests.matrix`` runs all of them and writes how many there were.
"""
