"""The numbers of README and docs/, written from results/ (and examples/) by ``python -m sparsync_lab.docs``.

A page holds blocks between ``<!-- generated: NAME -->`` and ``<!-- end -->``; ``blocks.py`` knows who writes each of
them. What stands outside of a block is written by hand, and holds no number that is measured.
"""
