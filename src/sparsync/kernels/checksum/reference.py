"""The checksum of messages in plain PyTorch: the specification.

Of the 32-bit words w of a message it is the sum of (2i + 3) w_i modulo 2**64, w unsigned, i from 0; the two words in
which it travels itself are left out. Integers are summed: any order gives the same bits.

In messages of up to 2**30 words it is another one for certain, once
- one word was changed, in whatever bits: 0 < |change| (2i + 3) < 2**64;
- two bits were flipped: both changes, 2**a (2i + 3) and 2**b (2j + 3), have a sum below 2**64 and, as these factors are
  odd, a difference of 0 only if they are the same bit;
- a bit was flipped in the checksum as it travels, be it alone or with one of the message, which changes it by no power
  of 2, as 2i + 3 is odd and above 1;
- two words have changed places: (2i - 2j) (w_j - w_i) is neither 0 nor as much as 2**64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.message.header import SUM

FIRST, STEP = 3, 2  # the factor of the first word, and how much more each one has than the last


def checksum(messages: Tensor) -> Tensor:
    """Return the checksums, int64, of messages (int32, any number of them) along the last dimension."""
    words = messages.long().bitwise_and_(0xFFFFFFFF)
    words[..., SUM : SUM + 2] = 0
    factors = torch.arange(messages.shape[-1], dtype=torch.int64, device=messages.device).mul_(STEP).add_(FIRST)
    return words.mul_(factors).sum(-1)
