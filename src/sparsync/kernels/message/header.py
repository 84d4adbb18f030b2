"""The first words of a message, described once for host and device."""

from typing import NamedTuple


class Header(NamedTuple):
    """The header: 32-bit words. Those before ``entries`` must be the same in all messages of an exchange."""

    version: int  # magic number and version of the format
    sequence: int  # number of the exchange
    unit: int  # bucket
    digest: int  # of the layout
    entries: int  # that are real
    flags: int
    where: int  # number of the first parameter with a non-finite gradient, or -1
    extra: int = 0  # of the collective


HEADER = len(Header._fields)  # words
SEQUENCE, UNIT, DIGEST, ENTRIES, FLAGS, WHERE, EXTRA = range(1, HEADER)  # where each word stands
