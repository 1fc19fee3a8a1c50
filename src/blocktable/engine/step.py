"""One step, as the scheduler tells it to workers: what changed in the tables, and token ids. Nothing else crosses."""

from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktable.delta import Delta

__all__ = ["Step"]


class Step(msgspec.Struct, frozen=True, eq=False):
    """A batch of rows in one forward pass.

    ``delta`` is the commit that the tables need first. Row rows[i] computes tokens[starts[i] : starts[i + 1]], the last
    ones of its lengths[i]; -1 is a token that the scheduler does not know yet: the one the worker drew for the row last.
    Draw k takes the next token after place at[k] of the step, by temperature and seed, and is remembered for row into[k]
    (-1: for none). ``poison`` are manager blocks to be filled with NaN, in the mode that shows wrong reads.
    """

    number: int
    delta: bytes
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    tokens: NDArray[np.int64]
    lengths: NDArray[np.int32]
    at: NDArray[np.int64]
    into: NDArray[np.int64]
    seeds: NDArray[np.int64]
    temperatures: NDArray[np.float64]
    poison: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """Return the step as bytes."""
        parts = [getattr(self, name).tobytes() for name, _ in _ARRAYS]
        return msgspec.msgpack.encode((self.number, self.delta, parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a step back."""
        number, delta, parts = msgspec.msgpack.decode(data, type=tuple[int, bytes, list[bytes]])
        return cls(number, delta, *(np.frombuffer(part, kind) for part, (_, kind) in zip(parts, _ARRAYS, strict=True)))

    def read_delta(self) -> Delta:
        """Return the commit."""
        return Delta.from_bytes(self.delta)

    def positions(self) -> NDArray[np.int64]:
        """Return each token's position in its row, int64 [T]."""
        counts = np.diff(self.starts)
        first = self.lengths - counts
        return np.arange(self.tokens.size) + np.repeat(first - self.starts[:-1], counts)


_ARRAYS = (
    ("rows", np.int32),
    ("starts", np.int32),
    ("tokens", np.int64),
    ("lengths", np.int32),
    ("at", np.int64),
    ("into", np.int64),
    ("seeds", np.int64),
    ("temperatures", np.float64),
    ("poison", np.int64),
)
