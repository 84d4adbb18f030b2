"""Whose warnings they are: without a logging configuration Python prints the bare sentence, amid those of others."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("sparsync")


def name_the_library(record: logging.LogRecord) -> bool:
    """Put the library's name before a message that no handler is there to format."""
    if not LOGGER.hasHandlers():
        record.msg = f"sparsync: {record.msg}"
    return True


LOGGER.addFilter(name_the_library)
