"""From the code that a compiled loop returned to the error that a user reads."""

from blocktable import _kernels as k
from blocktable.errors import ArgumentError, BlockTableError, DeltaError


def fault(code: int, verb: str, info: k.I64) -> BlockTableError:
    """Return the error of a refused call, from the values that the loop left in the fault row of ``info``."""
    scratch = info[-1]
    group, index, row, value, limit, column = (int(scratch[field]) for field in range(k.FAULT_COLUMN + 1))
    values = {"verb": verb, "group": group, "index": index, "row": row, "value": value, "limit": limit}
    where = f"{verb}: row {row} of group {group}"
    match code:
        case k.BAD_ROW:
            return no_row(verb, index, row, limit)
        case k.DUPLICATE_ROW:
            law, message = "L8", f"{verb}: row {row} comes twice in one call, again at rows[{index}]"
            remedy = "name each row once, or make two calls"
        case k.BAD_INDPTR:
            law, message = (
                "L2",
                f"{verb}: indptr does not cut the values into one part per row (group {group}, entry {index}: {value})",
            )
            remedy = "pass len(rows) + 1 offsets that start at 0, never fall, and end at the number of values"
        case k.OVERFLOW:
            law, message = "L2", f"{where} would hold {value} blocks, its width is {limit}"
            remedy = f"append at most {limit - column} here, or plan a larger max_model_len"
        case k.BAD_ID:
            law, message = "L3", f"{where}: block id {value} is outside 1..{limit - 1}"
            remedy = "append ids that the pool handed out"
        case k.NULL_ID:
            law, message = "L3", f"{where}: the null block 0 cannot be a live entry in column {column}"
            remedy = "only the leading entries of a window or chunked group and any of a state group may be null"
        case k.BAD_COUNT:
            law, message = "L2", f"{where} holds {limit} blocks, {value} cannot be its count"
            remedy = f"pass a count of 0..{limit}"
        case k.BAD_QUERY:
            law, message = (
                "L7",
                f"{verb}: query_start_loc[{index}] is {value} where at least {limit} or at most the tokens given is possible",
            )
            remedy = "pass offsets that start at 0, never fall, and end within positions and the output"
        case _:
            law, message = (
                "L11",
                f"{verb}: span {index} (group {group}, row {row}) reaches {value}, the limit is {limit}",
            )
            remedy = "start the replica from a snapshot"
    if verb == "apply":
        return DeltaError(message, law="L11", values=values, remedy="start the replica from a snapshot")
    return ArgumentError(message, law=law, values=values, remedy=remedy)


def no_row(verb: str, index: int, row: int, limit: int) -> ArgumentError:
    """Return the error of a call that names a row past ``max_rows``, or before the first."""
    return ArgumentError(
        f"{verb}: rows[{index}] is {row}, the tables have rows 0..{limit - 1}",
        law="L2",
        values={"verb": verb, "index": index, "row": row, "value": row, "limit": limit},
        remedy="use a row within max_rows",
    )
