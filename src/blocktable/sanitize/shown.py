"""What a watcher is shown, looked at as a whole before any of it counts: arrays of integers that belong together.

A wrong argument is the caller's mistake and no finding: it is refused, and the watcher stays as it was.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blocktable.errors import ArgumentError
from blocktable.sanitize.laws import Ints, as_numbers

LARGEST = np.iinfo(np.int64).max


class Shown(NamedTuple):
    """One step: per group what has groups, None for what was not given; ``asked`` has the row of each request."""

    tables: list[Any]
    counts: list[Ints]
    asked: Ints
    rows: Ints | None
    starts: Ints | None
    positions: Ints | None
    slots: list[Any]
    lengths: Ints | None
    copies: list[Any]
    requests: list[Hashable] | None
    verb: str


def shown(
    groups: int,
    tables: Any,
    num_blocks: Any,
    *,
    rows: Any,
    query_start_loc: Any,
    positions: Any,
    slots: Any,
    lengths: Any,
    copies: Any,
    requests: Any,
    verb: Any,
) -> Shown:
    """Return a step's arrays, int64 but for those of [rows, width]; raises ArgumentError where they do not fit together."""
    found, counts = _per_group("tables", tables, groups, 2), _per_group("num_blocks", num_blocks, groups, 1)
    for g, (table, count) in enumerate(zip(found, counts, strict=True)):
        if count.size > len(table):
            raise _refused(
                f"group {g} has {count.size} counts of live blocks and {len(table)} rows",
                "pass num_blocks of the leading rows, at most one per row of its table",
                group=g,
                counts=count.size,
                rows=len(table),
            )
    given, starts = _line("rows", rows), _line("query_start_loc", query_start_loc)
    where, held = _line("positions", positions), _line("lengths", lengths)
    asked = given if given is not None else np.arange(_requests(starts, held), dtype=np.int64)
    most = min(map(len, counts))
    outside = asked[(asked < -1) | (asked >= most)]
    if outside.size:
        raise _refused(
            f"a request has row {outside[0]}, live blocks are given of {most} rows",
            "give the counts of all rows that requests have; -1 is padding",
            row=int(outside[0]),
            rows=most,
        )
    mapped: list[Any] = [None] * groups if slots is None else _per_group("slots", slots, groups, 1)
    _fit_tokens(asked.size, starts, where, mapped)
    if held is not None:
        _fit_lengths(asked, held)
    named = None if requests is None else _names(requests, asked.size)
    mirrors = [None] * groups if copies is None else _per_group("copies", copies, groups, 2)
    return Shown(found, counts, asked, given, starts, where, mapped, held, mirrors, named, _word(verb))


def _requests(starts: Ints | None, lengths: Ints | None) -> int:
    """Return how many requests a step has whose rows are not given."""
    if starts is not None:
        return max(starts.size - 1, 0)
    return 0 if lengths is None else lengths.size


def _fit_tokens(requests: int, starts: Ints | None, positions: Ints | None, slots: list[Any]) -> None:
    """Refuse a slot mapping whose parts do not cut and hold the same tokens."""
    if starts is not None and (starts.size != requests + 1 or starts[0] != 0 or (starts[1:] < starts[:-1]).any()):
        raise _refused(
            f"query_start_loc does not cut tokens into {requests} requests: {_brief(starts)}",
            f"pass {requests + 1} offsets that begin with 0 and never fall",
            requests=requests,
            size=starts.size,
        )
    if slots[0] is None:
        return
    if starts is None or positions is None:
        raise _refused("slots come without query_start_loc or positions", "pass all three, or none")
    tokens = int(starts[-1])
    sizes = {"positions": positions.size} | {f"slots of group {g}": line.size for g, line in enumerate(slots)}
    for name, size in sizes.items():
        if size < tokens:
            raise _refused(
                f"query_start_loc counts {tokens} tokens, there are {size} {name}",
                "pass an entry per token; those past the last are padding",
                tokens=tokens,
                size=size,
            )


def _fit_lengths(rows: Ints, lengths: Ints) -> None:
    """Refuse lengths that are not one per request, and negative ones of requests that have a row."""
    _one_each("lengths", lengths.size, rows.size)
    bad = np.flatnonzero((rows >= 0) & (lengths < 0))
    if bad.size:
        said = f"request {bad[0]} has {lengths[bad[0]]} tokens"
        raise _refused(said, "pass the tokens that each request has", request=int(bad[0]), length=int(lengths[bad[0]]))


def _names(requests: Any, size: int) -> list[Hashable]:
    """Return what names each request, plain numbers of an array or tensor of them."""
    try:
        names = list(requests.tolist() if hasattr(requests, "tolist") else requests)
        for name in names:
            hash(name)
    except TypeError as error:
        said = f"requests cannot name requests: {error}"
        raise _refused(said, "pass a list of one hashable name per request, such as its id") from None
    _one_each("requests", len(names), size)
    return names


def _one_each(name: str, size: int, requests: int) -> None:
    if size != requests:
        raise _refused(
            f"{name} has {size} entries, and the step {requests} requests",
            "pass one per request; rows, query_start_loc or lengths say how many there are",
            size=size,
            requests=requests,
        )


def _word(verb: Any) -> str:
    try:
        if isinstance(verb, str) and verb.encode() is not None:
            return verb
    except UnicodeEncodeError:  # half of a character, which no file can hold
        pass
    raise _refused(f"verb must be text, got {verb!r}", 'pass a name such as "add_row"', verb=verb)


def _per_group(name: str, value: Any, groups: int, ndim: int) -> list[Any]:
    """Return one array of ``ndim`` dimensions per group; where there is one group it may come by itself."""
    several = isinstance(value, Sequence) and len(value) > 0 and getattr(value[0], "ndim", 0) > 0
    if groups == 1 and not several:
        array = _integers(name, value)
        parts = list(array) if array.ndim == ndim + 1 else [array]
    else:
        try:
            listed = list(value)
        except TypeError:
            said = f"{name} must be one array per group, got {type(value).__name__}"
            raise _refused(said, f"pass a list of {groups} arrays", groups=groups) from None
        parts = [_integers(f"{name} of group {g}", part) for g, part in enumerate(listed)]
    if len(parts) != groups:
        said = f"{name} has {len(parts)} arrays, there are {groups} groups"
        raise _refused(said, "pass one array per group", arrays=len(parts), groups=groups)
    for g, part in enumerate(parts):
        _of_shape(f"{name} of group {g}", part, ndim)
    return [part.astype(np.int64) for part in parts] if ndim == 1 else parts


def _line(name: str, value: Any) -> Ints | None:
    """Return an array of one dimension, None where it was not given."""
    if value is None:
        return None
    array = _integers(name, value)
    _of_shape(name, array, 1)
    line: Ints = array.astype(np.int64)
    return line


def _of_shape(name: str, array: Any, ndim: int) -> None:
    if array.ndim != ndim:
        wanted = "[rows, width]" if ndim == 2 else "of one dimension"
        raise _refused(
            f"{name} must be {wanted}, its shape is {array.shape}", "pass it in that shape", shape=array.shape
        )


def _integers(name: str, value: Any) -> Any:
    """Return an array of integers; what is none is refused rather than rounded."""
    try:
        array = as_numbers(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _refused(f"{name} cannot be read as an array: {error}", "pass integers, in rows of one length") from None
    if array.size == 0 and not hasattr(value, "dtype"):
        return array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise _refused(f"{name} must hold integers, got {array.dtype}", "pass int32 or int64", dtype=str(array.dtype))
    if array.dtype.kind == "u" and array.size and int(array.max()) > LARGEST:
        raise _refused(
            f"{name} holds {array.max()}, which does not fit int64", "pass int32 or int64", value=int(array.max())
        )
    return array


def _brief(line: Ints) -> str:
    listed = ", ".join(map(str, line[:5].tolist()))
    return f"[{listed}{', ...' if line.size > 5 else ''}]"


def _refused(said: str, remedy: str, **values: object) -> ArgumentError:
    return ArgumentError(f"watch: {said}", values=values, remedy=remedy)
