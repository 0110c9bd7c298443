"""What LocalSGD learners send in a round, in full or compressed, and how they mix what they receive."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roundelay.weights.compression import Compression, ErrorFeedback, Int8, TopK
from roundelay.weights.flat import Flat, all_finite

_HEADER = struct.Struct("<qq")  # form, checksum of phi
_FULL, _INT8, _CHANGES = range(3)

COMPRESSIONS: dict[str | None, type[Compression] | None] = {None: None, "int8": Int8, "top-k": TopK}


class OuterMessages:
    r"""Encodes $y_i$ for the neighbours, and mixes $\phi_i \leftarrow \sum_j W_{ij} y_j$ from what came.

    * In full: $y_j$ as it is.
    * int8: $Q_j = Q(y_j)$ and $\phi_i \leftarrow y_i + \sum_j W_{ij} (Q_j - Q_i)$. What rounding leaves out stays in the
      learner's own weights, so the sum over learners is exact. It needs no memory of earlier messages.
    * top-k: the change $v_j = C(y_j - \phi + e_j)$ with error feedback, and $\phi \leftarrow \phi + \sum_j W_{ij} v_j$. All
      learners must have the same $\phi$, which a checksum verifies. If a learner may have another $\phi$, because it
      has joined or has missed a message, the next round is sent in full.

    The own weights stand in for a missing neighbour's. Learners add in the order of ranks, so on the complete
    graph all get the same bits.

    Args:
        compress: None, "int8" or "top-k".
        phi: lengths and dtypes of the weights.
        in_step: all learners begin with the same phi.

    Attributes:
        in_step: all learners have the same phi, as far as this learner knows.
        nbytes: length of the last message.
        refused: peers whose last message had non-finite numbers, or was of other weights.
        measure: set it to have `disagreement2` measured in the next round.
        disagreement2: mean of |y_i - y_j|^2 over the messages of the last round that was measured.
    """

    def __init__(self, compress: str | None, phi: Flat, *, in_step: bool) -> None:
        kind = COMPRESSIONS[compress]
        self._compression = kind() if kind else None
        self._feedback = ErrorFeedback(TopK(), phi.parts) if compress == "top-k" else None
        self.in_step, self.nbytes = in_step, 0
        self.refused: list[int] = []
        self.disagreement2, self.measure = 0.0, True
        self._form = _FULL
        self._checksum = 0
        self._own: list[Tensor] = []  # what the message says: y, Q or v

    def encode(self, y: Flat, phi: Flat) -> Tensor:
        """The message of this learner."""
        if self._feedback and self.in_step:
            self._form, self._checksum = _CHANGES, zlib.crc32(phi.storage.numpy().data)
            data, self._own = self._feedback.encode(torch._foreach_sub(y.parts, phi.parts))
        elif isinstance(self._compression, Int8):
            self._form = _INT8
            data = self._compression.encode(y.parts)
            self._own = self._compression.decode(data, y.parts)
        else:
            self._form = _FULL
            data, self._own = y.storage, list(y.parts)
        header = torch.frombuffer(bytearray(_HEADER.pack(self._form, self._checksum)), dtype=torch.uint8)
        self.nbytes = len(header) + len(data)
        return torch.cat([header, data])

    def mix(self, row: Mapping[int, float], own: int, received: Mapping[int, Tensor], y: Flat, phi: Flat) -> list[int]:
        """Phi <- its mean over the neighbours; returns the peers that took part.

        Args:
            row: the weights W_ij by learner, in the order of ranks, the own one included.
            own: this learner.
            received: messages by peer.
            y: what `encode` was given.
            phi: changed in place.
        """
        values = {peer: self._decode(message, y) for peer, message in received.items()}
        usable = {peer: parts for peer, parts in values.items() if parts is not None}
        self.refused = sorted(values.keys() - usable.keys())
        if self.measure:
            self.disagreement2, self.measure = _mean_distance2(self._own, list(usable.values())), False
        missing = sum(weight for peer, weight in row.items() if peer != own and peer not in usable)
        mean = [torch.zeros_like(part) for part in y.parts]
        for learner, weight in row.items():
            if learner == own:
                torch._foreach_add_(mean, self._own, alpha=weight + missing)
            elif learner in usable:
                torch._foreach_add_(mean, usable[learner], alpha=weight)
        self._set_outer(phi, y, mean)
        self.in_step = len(usable) == len(row) - 1
        return sorted(usable)

    def _set_outer(self, phi: Flat, y: Flat, mean: list[Tensor]) -> None:
        if self._form == _CHANGES:
            torch._foreach_add_(phi.parts, mean)
        elif self._form == _INT8:
            torch._foreach_sub_(mean, self._own)
            for part, stepped, change in zip(phi.parts, y.parts, mean, strict=True):
                torch.add(stepped, change, out=part)
        else:
            for part, value in zip(phi.parts, mean, strict=True):
                part.copy_(value)

    def _decode(self, message: Tensor, like: Flat) -> list[Tensor] | None:
        """The numbers of a message; None if they cannot be used."""
        form, checksum = _HEADER.unpack(bytes(message[: _HEADER.size].tolist()))
        if form != self._form or (form == _CHANGES and checksum != self._checksum):
            return None
        data = message[_HEADER.size :]
        if form == _FULL:
            parts = like.layout.parts_of(data)
        else:
            assert self._compression is not None
            try:
                parts = self._compression.decode(data, like.parts)
            except ValueError:
                return None
        return parts if all_finite(parts) else None

    def state_dict(self) -> dict[str, Any]:
        """What compression has left out, and whether all learners have the same phi."""
        residual = self._feedback.residual if self._feedback else []
        return {"in_step": self.in_step, "residual": [part.clone() for part in residual]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.in_step = bool(state["in_step"])
        if self._feedback:
            for part, saved in zip(self._feedback.residual, state["residual"], strict=True):
                part.copy_(saved)


def _mean_distance2(own: list[Tensor], others: list[list[Tensor]]) -> float:
    """Mean of |own - other|^2."""
    squares = [
        float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2
        for other in others
        for x, y in zip(own, other, strict=True)
    ]
    return sum(squares) / max(len(others), 1)
