"""From a recording that fails to the fewest calls that still do, as a test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktable.errors import ArgumentError, BlockTableError, LawBroken
from blocktable.recording.literals import as_literal
from blocktable.recording.replay import Call, calls, make

__all__ = ["Shrunk", "shrink"]


@dataclass(frozen=True)
class Failure:
    """How a run fails: the law that the sanitizer finds broken, or the type of an error that no call may raise."""

    law: str
    kind: str
    text: str


@dataclass(frozen=True)
class Shrunk:
    """A minimal run: how it fails, the calls that are left of how many, and the test that shows it."""

    failure: Failure
    calls: tuple[Call, ...]
    before: int
    test: str


def shrink(path: str | Path, *, most: int = 20_000) -> Shrunk:
    """Cut a failing recording down to a minimal one that fails in the same way.

    Fails means: under the sanitizer a law is broken, or a call raises what no caller can cause. Whole calls are taken away,
    halves first, then ever smaller parts (delta debugging), until none can be missed; calls that are refused without those
    before them do no harm. Raises ArgumentError where the recording does not fail, or holds several objects of which none
    fails alone. Cost: up to ``most`` runs of what is left.
    """
    made, found, _ = calls(path)
    whole = _first_failure(made, found)
    if whole is None:
        raise ArgumentError(
            f"{path} does not fail: the sanitizer finds nothing in {len(found)} calls",
            values={"path": str(path), "calls": len(found)},
            remedy="shrink a recording that replay --until-finding stops in",
        )
    number, failure, upto = whole
    mine = [call for call in found[:upto] if call.number == number]

    def fails(part: Sequence[Call]) -> bool:
        now = failing(made[number], part)
        return now is not None and (now[0].law, now[0].kind) == (failure.law, failure.kind)

    left = minimal(mine, fails, most)
    again = failing(made[number], left)
    failure = again[0] if again else failure
    return Shrunk(failure, tuple(left), len(found), as_test(made[number], left, failure))


def _first_failure(made: list[dict[str, Any]], found: list[Call]) -> tuple[int, Failure, int] | None:
    """Return the object that fails first, how, and after how many of all calls."""
    first: tuple[int, Failure, int] | None = None
    for number, what in enumerate(made):
        places = [i for i, call in enumerate(found) if call.number == number]
        now = failing(what, [found[i] for i in places])
        if now is None:
            continue
        upto = places[now[1]] + 1 if now[1] >= 0 else 0
        if first is None or upto < first[2]:
            first = number, now[0], upto
    return first


def failing(what: dict[str, Any], part: Sequence[Call]) -> tuple[Failure, int] | None:
    """Run calls under the sanitizer; return how they fail, and at which of them, -1 for the making of the object."""
    try:
        one = make(what, "raise")
    except LawBroken as error:
        return Failure(error.law, "LawBroken", str(error)), -1
    for i, call in enumerate(part):
        try:
            getattr(one, call.verb)(*call.args, **call.named)
        except LawBroken as error:
            return Failure(error.law, "LawBroken", str(error)), i
        except BlockTableError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever else is raised is what is looked for
            return Failure("", type(error).__name__, str(error)), i
    return None


def minimal(items: Sequence[Call], fails: Callable[[Sequence[Call]], bool], most: int) -> list[Call]:
    """Return items of which none can be left out (delta debugging), or what is left after ``most`` tries."""
    left, parts = list(items), 2
    while len(left) >= 2 and most > 0:
        size = -(-len(left) // parts)
        shorter: list[Call] | None = None
        for begin in range(0, len(left), size):
            most -= 1
            without = left[:begin] + left[begin + size :]
            if without and fails(without):
                shorter = without
                break
        if shorter is not None:
            left, parts = shorter, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(left), 2 * parts)
    return left


def as_test(what: dict[str, Any], part: Sequence[Call], failure: Failure) -> str:
    """Return a test that makes the object and the calls, and expects nothing to be broken."""
    one = make(what)
    name = "cache" if "prefix_cache" in what else "tables"
    if "watch" in what:
        name = "watcher"
    lines = ["import blocktable", f"from blocktable import Group{', sanitize' * ('watch' in what)}", "", ""]
    lines += ["def test_it_keeps_the_laws() -> None:"]
    lines += ["    groups = ["]
    for group in one.groups:
        lines.append(f"        {as_literal(group)},")
    lines += ["    ]"]
    if name == "watcher":
        how = ", ".join(f"{key}={what[key]!r}" for key in ("num_blocks", "cp_rank", "ignore", "kernel_blocks"))
        lines += [f"    watcher = sanitize.watch(groups, {how})"]
    elif name == "cache":
        how = f"num_blocks={what['num_blocks']}, max_rows={what['max_rows']}, prefix_cache={what['prefix_cache']}"
        lines += [f"    cache = blocktable.KVCache(groups, {how}, cp_rank={what['cp_rank']}, sanitize=True)"]
    else:
        how = f"max_rows={what['max_rows']}, num_blocks={what['num_blocks']}"
        lines += [f"    tables = blocktable.BlockTables(groups, {how}, sanitize=True)"]
    last = len(part) - 1
    for i, call in enumerate(part):
        if i == last:
            lines.append(f"    # {failure.text.splitlines()[0][:300]}")
        lines.append(f"    {name}.{call}")
    return "\n".join(lines) + "\n"
