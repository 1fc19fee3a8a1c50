"""A short fuzz of everything that reads what others wrote: the kept corpus, then mutations for a few seconds each.

`make fuzz` does it by coverage for minutes, and keeps what it finds in corpus/.
"""

import random
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from targets import TARGETS, seeds  # noqa: E402 - data beside the test

SECONDS = 3


def mutated(rng: random.Random, pool: list[bytes]) -> bytes:
    data = bytearray(rng.choice(pool))
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del data[at : at + rng.randint(1, 16)]
            case 3:
                other = rng.choice(pool)
                begin = rng.randrange(len(other) + 1)
                data[at:at] = other[begin : begin + rng.randint(1, 40)]
            case 4:
                data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80", b"\x7f"])
            case _:
                data[at:at] = rng.choice([b"-1", b"9" * 30, b"--", b"=", b"nan", b'"', b"\n", b"[", b"{}", b"\xff"])
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_answers_and_refusals(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    pool = seeds(target) + [path.read_bytes() for path in sorted((HERE / "corpus" / target).glob("*"))]
    rng = random.Random(1)  # noqa: S311 - no secret
    for data in pool:
        TARGETS[target](data)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        data = mutated(rng, pool)
        try:
            TARGETS[target](data)
        except Exception as error:
            error.add_note(f"input: {data!r}")
            raise
