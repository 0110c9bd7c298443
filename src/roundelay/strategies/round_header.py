"""What LocalSGD learners tell each other about a round, as bytes before or instead of a message."""

from __future__ import annotations

import struct
from enum import IntEnum

import torch
from torch import Tensor

_HEADER = struct.Struct("<qqq")  # kind, the round that it is about, the sender's own round
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What the sender says."""

    BEGUN = 1  # the sender has begun the round
    NOT_YET = 2  # the sender has not begun the round
    ABSENT = 3  # the sender takes no part in the round with the receiver
    MESSAGE = 4  # the sender's message of the round follows


def write_header(buffer: Tensor, kind: Kind, round: int, own_round: int) -> None:
    """Write to the first `HEADER_BYTES` of a buffer."""
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(_HEADER.pack(kind, round, own_round)), dtype=torch.uint8)


def read_header(buffer: Tensor) -> tuple[int, int, int]:
    """Kind, round, and the sender's own round."""
    kind, round, own_round = _HEADER.unpack(bytes(buffer[:HEADER_BYTES].tolist()))
    return kind, round, own_round
