"""Ways out of a refused plan: changes of its arguments, each tried by the very code that refused.

``request`` is the arguments of `plan` as a mapping; ``solve(**request)`` returns when they are accepted and raises
otherwise. A way out is a dict of arguments to put in place of those given.
"""

from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any, NoReturn

from blocktable._ints import align_up, ceil_div, lcm
from blocktable.contracts.contract import Contract, common_kernel_block
from blocktable.contracts.releases import WidthPolicy
from blocktable.errors import BlockTableError, GeometryError

__all__ = ["explain", "integer", "own_policy", "ways", "wrong"]

Request = Mapping[str, Any]
Change = dict[str, Any]

_INT64_MAX = 2**63 - 1
_MOST_COLUMNS = 2**31
_COMMON = {"block_size": 64, "max_model_len": 4096}
"""What to suggest in place of a value that is no count at all."""


def integer(value: Any, name: str, *, least: int = 1) -> int:
    """Return an argument as an int of at least ``least``; bools, floats and strings are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        wrong(f"{name} must be an integer, got {value!r}", name, _COMMON.get(name, least), value=repr(value))
    number = int(value.__index__())
    if not least <= number <= _INT64_MAX:
        bound = f"at least {least}" if number < least else "at most 2**63 - 1"
        wrong(f"{name} must be {bound}, got {number}", name, _COMMON.get(name, least), value=number)
    return number


def own_policy(contracts: tuple[Contract, ...]) -> WidthPolicy | None:
    """Return how the engine sizes the rows of these backends, where that is not its release's policy."""
    return next((one.width_policy for one in contracts if one.width_policy), None)


def wrong(text: str, setting: str, better: int, *, law: str = "L1", **values: object) -> NoReturn:
    """Raise for one setting that is wrong whatever the others are, with a better value for it."""
    values = {**values, "setting": setting, "ways_out": [{setting: better}]}
    raise GeometryError(text, law=law, values=values, remedy=f"use {setting} {better}")


def explain(error: GeometryError, request: Request, solve: Callable[..., object]) -> GeometryError:
    """Return the error with its ways out, in words and in ``values``."""
    found = _mend(error, request, solve)
    return GeometryError(
        error.message, law=error.law, values=error.values | {"ways_out": found}, remedy=_sentence(found, request)
    )


def _mend(error: GeometryError, request: Request, solve: Callable[..., object]) -> list[Change]:
    """Return the ways out of an error; a setting wrong by itself is mended first, then what is wrong after that."""
    if "setting" not in error.values:
        return ways(request, solve)
    mended: Any = error.values["ways_out"]
    change: Change = mended[0]
    try:
        solve(**{**request, **change})
    except GeometryError as another:
        return [change | more for more in _mend(another, {**request, **change}, solve)]
    return [change]


def ways(request: Request, solve: Callable[..., object]) -> list[Change]:
    """Return the changes that are accepted: of the length, the block size, the headroom, the contracts.

    Cost: some tens of trial plans.
    """

    def works(change: Change) -> bool:
        try:
            solve(**{**request, **change})
        except BlockTableError:
            return False
        return True

    request = {name: int(value) if hasattr(value, "__index__") else value for name, value in request.items()}
    found = list(_lengths(request, works))
    found += [change for size in _block_sizes(request) if works(change := {"block_size": size})][:4]
    contracts: tuple[Contract, ...] = request["contracts"]
    smaller: list[Change] = [{name: 0} for name in ("lookahead", "extra_blocks") if request[name]]
    if len(contracts) > 1:
        smaller += [{"contracts": (*contracts[:at], *contracts[at + 1 :])} for at in range(len(contracts))]
    found += [change for change in smaller if works(change)]
    return found or [change for change in ({"contracts": ()},) if works(change)]


def _block_sizes(request: Request) -> list[int]:
    contracts: tuple[Contract, ...] = request["contracts"]
    listed = {size for one in contracts for size in (*one.kernel_block_sizes, *one.manager_block_sizes)}
    sizes = {size for size in listed if isinstance(size, int)}
    sizes |= {lcm(size, request["cp_interleave"]) for size in (16, 32, 64, 128, 256)}
    return sorted(sizes - {request["block_size"]})


def _lengths(request: Request, works: Callable[[Change], bool]) -> Iterator[Change]:
    """Propose the nearest length below, and both ends of the nearest range above, at which no width is in the way.

    The width is a multiple of what the contracts ask, in kernel blocks, and of what the engine rounds to, in manager
    blocks; so the longest length of a range fills a common multiple of both.
    """
    block, ranks, extra = request["block_size"], request["cp_size"], request["extra_blocks"]
    length, engine = request["max_model_len"], request["engine"]
    ahead = 0 if engine else request["lookahead"]
    contracts: tuple[Contract, ...] = request["contracts"]
    kernel = common_kernel_block(block, contracts)
    if kernel is None:
        return
    multiple = lcm(*(one.widths(kernel, ceil_div(length + ahead, ranks)).multiple for one in contracts))
    if multiple > _MOST_COLUMNS:
        return
    rounding = engine.alignment(block, own_policy(contracts)) if engine else 1
    step = lcm(rounding, multiple // gcd(multiple, block // kernel))
    blocks = ceil_div(length + ahead, block * ranks) + extra
    for top in (align_up(blocks - step + 1, step), align_up(blocks, step)):
        longest = (top - extra) * block * ranks - ahead
        if longest < 1 or not works({"max_model_len": longest}):
            continue
        if longest > length:
            yield {"max_model_len": _shortest(longest, max(1, longest - rounding * block * ranks + 1), works)}
        yield {"max_model_len": longest}


def _shortest(longest: int, least: int, works: Callable[[Change], bool]) -> int:
    """Return the shortest length from ``least`` on that works, given that all longer ones up to ``longest`` do."""
    while least < longest:
        middle = (least + longest) // 2
        if works({"max_model_len": middle}):
            longest = middle
        else:
            least = middle + 1
    return least


def _sentence(found: list[Change], request: Request) -> str:
    """Write the ways out in one sentence: lengths together, block sizes together, then the rest."""
    parts: list[str] = []
    lengths = [way["max_model_len"] for way in found if set(way) == {"max_model_len"}]
    if len(lengths) > 1:
        *below, first, last = lengths
        parts.append("max_model_len " + "".join(f"{one}, or " for one in below) + f"{first} to {last}")
    elif lengths:
        parts.append(f"max_model_len {lengths[0]}")
    sizes = [str(way["block_size"]) for way in found if set(way) == {"block_size"}]
    if sizes:
        parts.append("block_size " + " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1]))))
    parts += [
        " and ".join(_words(name, value, request) for name, value in way.items())
        for way in found
        if set(way) not in ({"block_size"}, {"max_model_len"})
    ]
    return f"ways out: {' · '.join(parts)}" if parts else ""


def _words(name: str, value: Any, request: Request) -> str:
    if name != "contracts":
        return f"{name} {value}"
    return f"without {', '.join(one.name for one in request['contracts'] if one not in value)}"
