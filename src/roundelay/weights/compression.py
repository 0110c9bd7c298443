"""Compressed numbers for slow links: int8 with a scale per block, and the largest numbers only (top-k)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128  # numbers that share a scale: the float32 scales add 3 % to the bytes
TOP_K = 1 / 32  # the fraction of the numbers that travels; with their positions this is a quarter of int8's bytes
_ALIGNMENT = 8  # bytes: enough for every dtype

Parts = Sequence[Tensor]
"""Flat tensors, one per dtype, such as `Flat.parts`."""


class Compression(ABC):
    """Turns numbers into fewer bytes, and back into numbers close to the first ones."""

    @abstractmethod
    def encode(self, parts: Parts) -> Tensor:
        """The bytes (uint8). Their number depends on the lengths and dtypes of the parts only."""

    @abstractmethod
    def decode(self, data: Tensor, like: Parts) -> list[Tensor]:
        """The numbers, in new tensors with the lengths and dtypes of `like`. Raises ValueError for bytes of other parts."""


class Int8(Compression):
    r"""$v_b = s_b \, \mathrm{round}(x_b / s_b)$ with $s_b = \max|x_b| / 127$ for each block b of `BLOCK` numbers.

    The error of a number is at most half of its block's $s_b$. A block with a non-finite number comes out non-finite.

    >>> values = torch.tensor([1.0, -0.5, 0.25])
    >>> Int8().decode(Int8().encode([values]), like=[values])
    [tensor([ 1.0000, -0.5039,  0.2520])]
    """

    def encode(self, parts: Parts) -> Tensor:
        """All scales of a part, then its numbers."""
        encoded: list[Tensor] = []
        for part in parts:
            blocks = _in_blocks(part.float())
            least, most = torch.aminmax(blocks, dim=1)
            scales = torch.maximum(-least, most) / 127
            # A block of zeros has scale 0: any divisor gives zeros.
            numbers = (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).round_().to(torch.int8)
            encoded += [scales, numbers.flatten()[: len(part)]]
        return _packed(encoded)

    def decode(self, data: Tensor, like: Parts) -> list[Tensor]:
        """Scale times number."""
        kinds = [kind for part in like for kind in ((_blocks(len(part)), torch.float32), (len(part), torch.int8))]
        tensors = iter(_unpacked(data, kinds))
        decoded = []
        for part, scales, numbers in zip(like, tensors, tensors, strict=True):
            values = _in_blocks(numbers.float())
            values *= scales[:, None]
            decoded.append(values.view(-1)[: len(part)].to(part.dtype))
        return decoded


class TopK(Compression):
    """The `TOP_K` part of the numbers with the largest absolute values; all others become zero.

    >>> values = torch.tensor([0.1, -3.0, 0.2])
    >>> TopK().decode(TopK().encode([values]), like=[values])
    [tensor([ 0., -3.,  0.])]
    """

    def encode(self, parts: Parts) -> Tensor:
        """The numbers of a part, then their positions."""
        encoded: list[Tensor] = []
        for part in parts:
            positions = part.abs().topk(_kept(len(part)), sorted=False).indices
            encoded += [part[positions], positions.to(torch.int32)]
        return _packed(encoded)

    def decode(self, data: Tensor, like: Parts) -> list[Tensor]:
        """Zeros, with the numbers at their positions."""
        kinds = [kind for p in like for kind in ((_kept(len(p)), p.dtype), (_kept(len(p)), torch.int32))]
        tensors = iter(_unpacked(data, kinds))
        decoded = []
        for part, numbers, positions in zip(like, tensors, tensors, strict=True):
            if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(part):
                raise ValueError(f"a position is outside of the {len(part)} numbers")
            decoded.append(torch.zeros_like(part).index_copy_(0, positions.long(), numbers))
        return decoded


class ErrorFeedback:
    r"""Sends what compression has left out in a later message: $v = C(u + e)$, $e \leftarrow u + e - v$.

    So after any number of messages $\sum v + e = \sum u$: nothing is lost, it only comes later.

    Args:
        compression: C.
        like: lengths and dtypes of the numbers.
    """

    def __init__(self, compression: Compression, like: Parts) -> None:
        self._compression = compression
        self.residual = [torch.zeros_like(part) for part in like]

    def encode(self, parts: Parts) -> tuple[Tensor, list[Tensor]]:
        """The bytes of v, and v."""
        torch._foreach_add_(self.residual, list(parts))
        data = self._compression.encode(self.residual)
        sent = self._compression.decode(data, self.residual)
        torch._foreach_sub_(self.residual, sent)
        return data, sent


def _kept(count: int) -> int:
    return -(-count * TOP_K.as_integer_ratio()[0] // TOP_K.as_integer_ratio()[1])


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """Rows of `BLOCK` numbers; zeros fill the last one. A view if they fit."""
    missing = -len(values) % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    pieces = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    return torch.cat([torch.nn.functional.pad(piece, (0, -len(piece) % _ALIGNMENT)) for piece in pieces])


def _unpacked(data: Tensor, kinds: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    lengths = [count * dtype.itemsize for count, dtype in kinds]
    padded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    if sum(padded) != len(data):
        raise ValueError(f"these parts take {sum(padded)} bytes, got {len(data)}")
    pieces = zip(data.split(padded), lengths, kinds, strict=True)
    return [piece[:length].view(dtype) for piece, length, (_, dtype) in pieces]
