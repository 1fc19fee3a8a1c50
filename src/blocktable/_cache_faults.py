"""From the code that a loop of the cache returned to the error that a user reads."""

from typing import TYPE_CHECKING

from blocktable import _cache_layout as c
from blocktable import _kernels as k
from blocktable._faults import fault
from blocktable.errors import ArgumentError, BlockTableError, NeverFits, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blocktable._cache_plan import Plan


def short(verb: str, meta: c.I64, rows: "Sequence[int]", headroom: int, usable: int) -> OutOfBlocks:
    """Return the error of a call that the pool is short of blocks for; ``rows`` are those it could not serve."""
    needed, available = int(meta[c.NEEDED]), int(meta[c.AVAILABLE])
    kept = f", {headroom} of them to be kept" if headroom else ""
    remedy = "free or preempt rows, or serve fewer with partial=True or another call"
    if needed + headroom > usable:
        remedy = f"the pool has {usable} blocks in all: compute fewer tokens, or fewer rows, in one call"
    return OutOfBlocks(
        f"{verb}: {needed} blocks are needed, {available} are available{kept}",
        law="L9",
        values={"needed": needed, "available": available, "rows": list(rows), "headroom": headroom},
        remedy=remedy,
    )


def never(verb: str, plan: "Plan", tokens: int, row: int) -> NeverFits:
    """Return the error of a row that neither its width nor an empty pool could hold."""
    needed, usable, what = plan.obstacle(tokens)
    return NeverFits(
        f"{verb}: row {row} of {tokens} tokens needs {needed} blocks, {what} {usable}",
        law="L2" if what.startswith("its") else "L9",
        values={"needed": needed, "usable": usable, "largest": plan.largest, "row": row, "tokens": tokens},
        remedy=f"the longest row that fits has {plan.largest} tokens",
    )


def refusal(code: int, verb: str, info: k.I64, plan: "Plan") -> BlockTableError:
    """Return the error of a refused call, from the values that the loop left in the fault row of ``info``."""
    if code < c.GROW:
        return fault(code, verb, info)
    scratch = info[-1]
    index, row, value, limit, mark = (
        int(scratch[field]) for field in (k.FAULT_INDEX, k.FAULT_ROW, k.FAULT_VALUE, k.FAULT_LIMIT, k.FAULT_COLUMN)
    )
    if code == c.NEVER:
        return never(verb, plan, value, row)
    law, message, remedy = _texts(code, verb, index, row, value, limit, mark)
    values = {"verb": verb, "index": index, "row": row, "value": value, "limit": limit}
    if code == c.TOO_SHORT:
        values["least"] = limit
    return ArgumentError(message, law=law, values=values, remedy=remedy)


def _texts(code: int, verb: str, index: int, row: int, value: int, limit: int, mark: int) -> tuple[str, str, str]:
    at = f"{verb}: row {row}"
    match code:
        case c.IN_USE:
            return "L8", f"{at} is in use", "free it first, or take one that acquire_rows proposes"
        case c.NOT_IN_USE:
            return "L9", f"{at} is not in use", "open it with match, admit or extend; free a row only once"
        case c.OTHER_SALT:
            return "L10", f"{at} was opened with another salt", "pass None for rows in use, or free the row first"
        case c.BAD_TOKEN:
            return "L10", f"{at} is given a token below -1", "tokens are 0 or more, or -1 where not yet known"
        case c.BAD_FINAL if verb == "confirm":
            return (
                "L10",
                f"{at} cannot be confirmed up to {value}: its final mark is {mark}, its length {limit}",
                f"confirm a length of {mark}..{limit}",
            )
        case c.BAD_FINAL:
            return "L10", f"{at} cannot be final up to {value}, its length is {limit}", f"pass a final of 0..{limit}"
        case c.UNKNOWN_TOKEN:
            return (
                "L10",
                f"{at} cannot be final up to {limit}: its token at position {value} is not known",
                "confirm with the tokens, or only up to that position",
            )
        case c.BAD_LENGTH:
            return "L2", f"{at} has {limit} tokens, {value} cannot be its length", f"pass a length of 0..{limit}"
        case c.TOO_SHORT:
            return (
                "L3",
                f"{at} cannot be cut to {value} tokens: what a window or a state needs below {limit} is gone",
                f"the least possible length is {limit}; below it, free the row and admit it again",
            )
        case c.BAD_TOKENS:
            return (
                "L10",
                f"{at} is confirmed from position {mark} on, which takes {limit} tokens, not {value}",
                "pass the tokens of positions final[row] .. length - 1, -1 where the one held stays",
            )
        case _:
            return "L2", f"{verb}: limit[{index}] is {value}", "a limit is 0 or more tokens"
