"""Sanitized host tables: each verb is worked out once more in NumPy, from its documentation, and compared."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blocktable._arrays import is_integer
from blocktable.contracts import AtLeast, AtMost, Contract, Exactly, FloatModulus, TokenMultiple
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, BlockTableError, ConcurrentUse, DeltaError
from blocktable.groups import Group
from blocktable.replica import Replica
from blocktable.sanitize.findings import Report, caller
from blocktable.sanitize.laws import Broken, Ints, Unit
from blocktable.sanitize.reading import Looks, Reading, Unreadable, integers
from blocktable.sanitize.shadow import SWEPT, Shadow, Write, ragged

VERBS = ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy")


class Unlawful(Exception):  # noqa: N818 - what the shadow says of a call, not a failure of the shadow
    """The call breaks a law: it must be refused."""

    def __init__(self, law: str, why: str) -> None:
        super().__init__(why)
        self.law, self.why = law, why


class TablesSanitizer(Looks):
    """The shadow of one ``BlockTables``: ``report`` has what was found, ``close`` looks for what was never given back."""

    def __init__(self, tables: Any, report: Report) -> None:
        self.tables = tables
        self.report = report
        self.shadow = Shadow(self._units(), tables.max_rows, report)
        self.shadow.show(tables.tables)

    def _units(self) -> list[Unit]:
        return [Unit.of(g, shape, self.tables.num_blocks) for g, shape in enumerate(self.tables.shapes)]

    def call(self, frame: Any, verb: str, real: Callable[..., Any], args: Any, named: Any) -> None:
        """Run a verb, beside its meaning."""
        shadow = self.shadow
        shadow.begin(verb, frame)
        refusal: Unlawful | None = None
        writes: list[Write] | None = None
        try:
            writes = list(getattr(self, f"_{verb}")(*args, **named))
        except Unlawful as error:
            refusal = error
        except (Unreadable, TypeError, ValueError, OverflowError):
            pass
        try:
            real(*args, **named)
        except ConcurrentUse:
            raise
        except BlockTableError as error:
            shadow.sweep("a refused call left a trace")
            if writes is not None and isinstance(error, ArgumentError):
                shadow.find(Broken("L2", f"a lawful call is refused: {error}"))
            self.settle()
            raise
        if refusal is not None:
            shadow.find(Broken(refusal.law, f"accepted, though {refusal.why}"))
        if writes is None:
            shadow.follow()
        else:
            shadow.write(writes)
            shadow.compare(writes)
        self.settle()

    def settle(self) -> None:
        """After a finding that did not raise, go on from what is there."""
        if not self.shadow.clean:
            self.shadow.follow()

    # ---- what verbs mean

    def _append(self, rows: Any, indptr: Any, ids: Any, group: Any = 0) -> Any:
        return self._write(rows, indptr, ids, group, replace=False)

    def _assign(self, rows: Any, indptr: Any, ids: Any, group: Any = 0) -> Any:
        return self._write(rows, indptr, ids, group, replace=True)

    def _write(self, rows: Any, indptr: Any, ids: Any, group: Any, *, replace: bool) -> list[Write]:
        wanted = self._rows(rows)
        found = []
        for g, offsets, blocks in self._parts(group, indptr, ids):
            starts, values, unit = integers(offsets), integers(blocks), self.shadow.units[g]
            sizes = np.diff(starts)
            if starts.size != wanted.size + 1 or starts[0] != 0 or (sizes < 0).any() or starts[-1] != values.size:
                raise Unlawful("L2", "indptr does not cut the ids into one part per row")
            before = self.shadow.counts[g, wanted]
            begin = before * (not replace)
            counts = begin + sizes
            if (counts > unit.width).any():
                raise Unlawful("L2", f"a row of group {g} would hold {counts.max()} blocks of {unit.width}")
            self._check_ids(unit, values, wanted, starts, replace=replace)
            line = self.shadow.base[g] + wanted * unit.width
            gone = np.maximum(before - counts, 0)
            at = np.concatenate([ragged(line + begin, sizes), ragged(line + counts, gone)])
            found.append(Write(g, at, np.concatenate([values, np.zeros(gone.sum(), np.int64)]), wanted, counts))
        return found

    def _check_ids(self, unit: Unit, ids: Ints, rows: Ints, starts: Ints, *, replace: bool) -> None:
        """Refuse ids that the group's rows may not hold."""
        if ((ids < 0) | (ids >= unit.limit)).any():
            raise Unlawful("L3", f"an id is outside 1..{unit.limit - 1}")
        if unit.kind == "state" or (ids != 0).all():
            return
        for i, row in enumerate(rows.tolist()):
            part = ids[starts[i] : starts[i + 1]]
            before: Any = [] if replace else self.shadow.entries[unit.group][row, : self.shadow.counts[unit.group, row]]
            whole = np.concatenate([np.asarray(before, np.int64), part])
            leading = np.cumsum(whole != 0) == 0
            if ((whole == 0) & ~(leading & (unit.kind in ("window", "chunked")))).any():
                raise Unlawful("L3", f"the null block would be a live entry of row {row} of group {unit.group}")

    def _truncate(self, rows: Any, num_blocks: Any, group: Any = 0) -> Any:
        wanted = self._rows(rows)
        for g, totals in self._parts(group, num_blocks):
            counts = per_row(totals, wanted)
            if ((counts < 0) | (counts > self.shadow.counts[g, wanted])).any():
                raise Unlawful("L2", f"a row of group {g} has fewer blocks than it is cut to")
            yield self._nulled(g, wanted, counts, self.shadow.counts[g, wanted], counts)

    def _clear(self, rows: Any) -> Any:
        wanted = self._rows(rows)
        none = np.zeros(wanted.size, np.int64)
        for g in range(len(self.shadow.units)):
            yield self._nulled(g, wanted, none, self.shadow.counts[g, wanted], none)

    def _release(self, rows: Any, counts: Any, group: Any) -> Any:
        ((g, totals),) = self._parts(group, counts)
        if self.shadow.units[g].kind in ("full", "ring"):
            raise Unlawful("L3", f"every entry of group {g} is read")
        wanted = self._rows(rows)
        gone, live = per_row(totals, wanted), self.shadow.counts[g, wanted]
        if ((gone < 0) | (gone > live)).any():
            raise Unlawful("L2", f"a row of group {g} has fewer blocks than it gives up")
        yield self._nulled(g, wanted, np.zeros_like(gone), gone, live)

    def _nulled(self, g: int, rows: Ints, begin: Ints, end: Ints, counts: Ints) -> Write:
        at = ragged(self.shadow.base[g] + rows * self.shadow.units[g].width + begin, end - begin)
        return Write(g, at, np.zeros(at.size, np.int64), rows, counts)

    def _move(self, src: Any, dst: Any) -> list[Write]:
        source, target = self._pairs(src, dst)
        self._rows(source)
        left = source[~np.isin(source, target)]
        return self._copied(np.concatenate([source, np.full(left.size, -1)]), np.concatenate([target, left]))

    def _swap(self, a: Any, b: Any) -> list[Write]:
        one, other = self._pairs(a, b)
        self._rows(np.concatenate([one, other]))
        return self._copied(np.concatenate([one, other]), np.concatenate([other, one]))

    def _copy(self, src: Any, dst: Any) -> list[Write]:
        source, target = self._pairs(src, dst)
        origin: dict[int, int] = {}  # pair after pair: a source may be what an earlier pair made
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            origin[other] = origin.get(one, one)
        return self._copied(integers(list(origin.values())), integers(list(origin)))

    def _copied(self, source: Ints, target: Ints) -> list[Write]:
        """Make rows what other rows (-1: an empty one) are, all read before any is written."""
        found = []
        for g, unit in enumerate(self.shadow.units):
            counts = np.where(source >= 0, self.shadow.counts[g, source], 0)
            most = np.maximum(counts, self.shadow.counts[g, target])
            at, offset = ragged(self.shadow.base[g] + target * unit.width, most), ragged(np.zeros_like(most), most)
            values = self.shadow.entries[g][np.repeat(source, most), offset]
            values[offset >= np.repeat(counts, most)] = 0
            found.append(Write(g, at, values, target, counts))
        return found

    def _rows(self, rows: Any) -> Ints:
        found = integers(rows)
        if ((found < 0) | (found >= self.shadow.max_rows)).any():
            raise Unlawful("L2", "there is no such row")
        if np.unique(found).size != found.size:
            raise Unlawful("L8", "a row comes twice in one call")
        return found

    def _pairs(self, one: Any, other: Any) -> tuple[Ints, Ints]:
        source, target = integers(one), self._rows(other)
        if source.size != target.size:
            raise Unreadable
        if ((source < 0) | (source >= self.shadow.max_rows)).any():
            raise Unlawful("L2", "there is no such row")
        return source, target

    def _parts(self, group: Any, *arrays: Any) -> list[tuple[Any, ...]]:
        size = len(self.shadow.units)
        if group is None:
            if any(not isinstance(array, (tuple, list)) or len(array) != size for array in arrays):
                raise Unreadable
            return [(g, *(array[g] for array in arrays)) for g in range(size)]
        if not is_integer(group):
            raise Unreadable
        if not 0 <= group < size:
            raise Unlawful("L2", f"there is no group {group}")
        return [(int(group), *arrays)]

    # ---- commits and what is read

    def committed(self, delta: Delta) -> None:
        """Look at a delta: it must turn what was sent into what is there."""
        shadow = self.shadow
        if delta.seq != shadow.step + 1:
            shadow.find(Broken("L11", f"delta {delta.seq} follows {shadow.step}"))
        for broken in shadow.apply(delta):
            shadow.find(broken)
        shadow.sweep()
        shadow.committed()
        look_at_bytes(shadow, delta)
        self.settle()

    def resized(self) -> None:
        """Start over with other shapes."""
        self.shadow.arrange(self._units())
        self.shadow.show(self.tables.tables)
        for broken in widths_broken(self.tables.groups, self.tables.tables):
            self.shadow.find(broken)

    def close(self) -> None:
        """Report rows that still hold blocks (L9): whoever used the tables has forgotten them."""
        self.shadow.begin("close", caller(1))
        self.shadow.sweep()
        for g, row in np.argwhere(self.shadow.counts)[:1].tolist():
            left = int(np.count_nonzero(self.shadow.counts))
            block = int(self.shadow.entries[g][row, 0])
            self.shadow.find(Broken("L9", f"{left} rows still hold blocks", g, row, 0, block))


def per_row(values: Any, rows: Ints) -> Ints:
    """Return one integer per row."""
    found = integers(values)
    if found.size != rows.size:
        raise Unreadable
    return found


def widths_broken(groups: Sequence[Group], tables: Any) -> Any:
    """Yield what is wrong with shapes: units (L12), and a width that is not the smallest accepted one (L1)."""
    for g, group in enumerate(groups):
        shape = group.geometry
        block, kernel = shape.block_size, shape.kernel_block_size
        if block % kernel or block % shape.cp_interleave:
            yield Broken("L12", f"kernel blocks of {kernel} do not divide {block}", g)
        sizes = (size for size in range(block, 0, -1) if block % size == 0)
        best = next((size for size in sizes if all(one.accepts_block(size) for one in shape.contracts)), 0)
        if shape.contracts and kernel != best:
            yield Broken(
                "L12", f"the kernel block is {kernel}, the largest that divides {block} and suits is {best}", g
            )
        ratio = block // kernel
        if shape.width != shape.kernel_width // ratio or tables[g].array.shape[1] != shape.width:
            said = f"{tables[g].array.shape[1]} columns, {shape.width} planned, {shape.kernel_width} for the kernel"
            yield Broken("L1", f"widths disagree: {said}", g)
        if shape.engine is not None:
            continue  # a release's own width, taken as it is
        # Rounded here by itself: this is what judges the one place that rounds.
        tokens = shape.max_model_len + shape.lookahead
        needed = (-(-tokens // (block * shape.cp_size)) + shape.extra_blocks) * ratio
        if shape.kernel_width < needed:
            yield Broken("L1", f"{shape.kernel_width} columns, {needed} are needed for {tokens} tokens", g)
            continue
        longest = -(-tokens // shape.cp_size)
        accepted = (
            width
            for width in range(needed, shape.kernel_width + 1)
            if all(_literally(one, width, kernel, longest) for one in shape.contracts)
        )
        first = next(accepted, None)
        if first != shape.kernel_width:
            said = "a contract refuses them" if first is None else f"{first} would do"
            yield Broken("L1", f"{shape.kernel_width} columns where {needed} are needed: {said}", g)


def _literally(contract: Contract, width: int, block: int, longest: int) -> bool:
    """Say whether a contract takes a width, by its rule as the kernel writes it."""
    rule, blocks = contract.width_rule, -(-longest // block)
    if width < contract.min_width:
        return False
    match rule:
        case TokenMultiple():
            return width * block % rule.tokens == 0
        case FloatModulus():
            return width % (rule.tokens / block) == 0.0
        case AtMost():
            return width <= blocks
        case AtLeast():
            return width >= blocks
        case Exactly():
            return width == blocks
        case _:
            return True


# ---- the classes that take the place of those constructed


def _verb(name: str) -> Callable[..., None]:
    def checked(self: Any, *args: Any, **named: Any) -> None:
        self.sanitizer.call(caller(1), name, getattr(super(SanitizedTables, self), name), args, named)

    checked.__name__ = name
    return checked


class Committing:
    """What commits, sanitized: deltas and snapshots are looked at."""

    sanitizer: Any

    def commit(self) -> Delta:
        """Do what the object does, and look at the delta."""
        self.sanitizer.shadow.begin("commit", caller(1))
        delta: Delta = super().commit()  # type: ignore[misc]
        self.sanitizer.committed(delta)
        return delta

    def snapshot(self) -> bytes:
        """Do what the object does; small tables are read back and compared."""
        data: bytes = super().snapshot()  # type: ignore[misc]
        self.sanitizer.shadow.begin("snapshot", caller(1))
        look_at_snapshot(self.sanitizer.shadow, data)
        return data


class SanitizedTables(Committing, Reading):
    """Comes before ``BlockTables`` in the class of sanitized ones."""

    def __init__(self, *args: Any, sanitize: Any = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.sanitizer = TablesSanitizer(self, Report.of(sanitize))
        self.sanitizer.shadow.begin("BlockTables", caller(1))
        self.sanitizer.resized()

    def resize(self, groups: Any) -> None:
        """Do what the tables do, and start over."""
        self.sanitizer.shadow.begin("resize", caller(1))
        live = self.sanitizer.shadow.counts.any()
        super().resize(groups)  # type: ignore[misc]
        if live:
            self.sanitizer.shadow.find(Broken("L1", "accepted, though a row is live"))
        self.sanitizer.resized()


for _name in VERBS:
    setattr(SanitizedTables, _name, _verb(_name))


def look_at_bytes(shadow: Shadow, delta: Delta) -> None:
    """Report a delta whose bytes say something else (L11); those of large tables are not looked at."""
    if shadow.flat.size > SWEPT:
        return
    try:
        again = Delta.from_bytes(delta.to_bytes())
    except DeltaError as error:
        shadow.find(Broken("L11", f"the bytes of delta {delta.seq} cannot be read back: {error.message}"))
        return
    parts = ((delta.spans, again.spans), (delta.values, again.values), (delta.copies, again.copies))
    if again.seq != delta.seq or not all(np.array_equal(one, other) for one, other in parts):
        shadow.find(Broken("L11", f"the bytes of delta {delta.seq} say something else"))


def look_at_snapshot(shadow: Shadow, data: bytes) -> None:
    """Report a snapshot that is not what was committed (L11)."""
    if shadow.flat.size > SWEPT:
        return
    try:
        made = Replica.from_snapshot(data)
    except DeltaError as error:
        shadow.find(Broken("L11", f"a snapshot cannot be read back: {error.message}"))
        return
    for g, table in enumerate(made.tables):
        a, b = shadow.base[g], shadow.base[g + 1]
        wrong = np.flatnonzero(table.array.reshape(-1) != shadow.sent[a:b])
        if wrong.size or (table.num_blocks != shadow.sent_counts[g]).any():
            _, row, column = shadow.where(int(a + wrong[0])) if wrong.size else (g, -1, -1)
            shadow.find(Broken("L11", "a snapshot is not what was committed", g, row, column))
