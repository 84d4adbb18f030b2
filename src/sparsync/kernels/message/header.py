"""The first words of a message, described once for host and device."""

from typing import NamedTuple


class Header(NamedTuple):
    """The header: 32-bit words. Those before ``entries`` must be the same in all messages of an exchange.

    ``sum_low`` and ``sum_high`` travel as the message's checksum; of a header that was received they hold in which of
    its bits the checksum is not that of the message: 0, where nothing was damaged.
    """

    version: int  # magic number and version of the format
    sequence: int  # number of the exchange
    unit: int  # bucket
    digest: int  # of the layout
    entries: int  # that are real
    flags: int
    where: int  # number of the first parameter with a non-finite gradient, or -1
    extra: int = 0  # of the collective; where a rank sends several messages at once, entries in all of them
    sum_low: int = 0
    sum_high: int = 0

    @property
    def damaged(self) -> bool:
        """Whether a message that was received is not as it was sent."""
        return bool(self.sum_low or self.sum_high)


HEADER = len(Header._fields)  # words
SEQUENCE, UNIT, DIGEST, ENTRIES, FLAGS, WHERE, EXTRA, SUM, _ = range(1, HEADER)  # where each word stands
LANES = 1 << (HEADER - 1).bit_length()  # in which a kernel reads it
