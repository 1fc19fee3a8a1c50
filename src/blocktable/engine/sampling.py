"""Draw tokens from logits: greedy, or by seed and position, so that a draw does not depend on the rest of the batch."""

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["draw"]


def draw(
    logits: torch.Tensor,
    positions: NDArray[np.int64],
    seeds: NDArray[np.int64],
    temperatures: NDArray[np.float64],
) -> torch.Tensor:
    """Return one token per line of logits [n, vocabulary], int64 [n].

    The token at a position of a sequence has a random stream of its own, keyed by (seed, position): what is preempted and
    computed again, and a draft that is verified, gets the token that a plain step would have drawn.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> draw(logits, np.array([7]), np.array([0]), np.array([0.0])).tolist()
    [1]
    """
    tokens = logits.argmax(dim=-1)
    for line in np.flatnonzero(temperatures > 0).tolist():
        stream = np.random.Generator(np.random.Philox(key=[int(seeds[line]), int(positions[line])]))
        noise = torch.from_numpy(stream.gumbel(size=logits.shape[1]))  # the largest of logit + noise is a fair draw
        tokens[line] = (logits[line].double().cpu() / float(temperatures[line]) + noise).argmax()
    return tokens
