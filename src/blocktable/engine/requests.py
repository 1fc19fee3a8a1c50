"""What is asked of the engine, and what comes of it."""

from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from blocktable.errors import ArgumentError

__all__ = ["Completion", "Event", "Request", "Sequence"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt of token ids, and how to go on from it.

    ``temperature`` 0 is greedy; above it, sample i of ``samples`` draws with seed ``seed`` + i, whatever else the engine
    runs at the time. A continuation ends with a token of ``stop``, which it keeps, or after ``max_tokens``. Raises
    ArgumentError for what nothing can be drawn by.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1
    stop: frozenset[int] = frozenset()
    salt: bytes | None = None

    def __post_init__(self) -> None:
        """Check what does not depend on the engine."""
        if not self.prompt:
            raise ArgumentError("the prompt has no tokens", values={"prompt": 0}, remedy="pass at least one token")
        for name, least in (("max_tokens", 1), ("samples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)}",
                    values={name: getattr(self, name)},
                    remedy=f"pass {least} or more",
                )
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(
                f"temperature is {self.temperature}",
                values={"temperature": self.temperature},
                remedy="pass 0 for the likeliest token, or a finite number above it",
            )


class Event(NamedTuple):
    """One token of one sample of one request; ``finish`` is "" while it goes on, else "stop" or "length"."""

    request: int
    sample: int
    token: int
    finish: str


@dataclass
class Completion:
    """One finished continuation: its token ids, its text where there is a tokenizer, and why it ended."""

    tokens: list[int]
    finish: str
    text: str = ""


@dataclass(eq=False)
class Sequence:
    """One continuation as the scheduler sees it.

    ``tokens`` are those known, prompt and answer; ``row`` is its row of the cache (None: it waits); ``length`` counts the
    tokens that the row holds, the last of which may be of a step still in flight; ``pending`` counts the steps in flight
    that draw a token for it.
    """

    request: Request
    number: int
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    length: int = 0
    pending: int = 0
    finish: str = ""
    forks: bool = False

    @property
    def most(self) -> int:
        """The tokens that its row may ever hold: the last one generated is not computed."""
        return len(self.request.prompt) + self.request.max_tokens - 1
