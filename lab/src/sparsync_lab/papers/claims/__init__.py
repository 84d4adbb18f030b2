"""The papers' claims and our questions, each judged by the tables that are stored.

``claim.py`` says what a claim and a verdict are, ``stored_tables.py`` reads what is stored, ``verdicts.py`` lists all.
"""
