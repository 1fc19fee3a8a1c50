"""The classes that take the place of those constructed while recording: each verb is done, and told to the recorder."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache as cached_by
from functools import partial as partial_of
from functools import wraps
from inspect import signature
from time import perf_counter
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from blocktable import _sanitized
from blocktable._arrays import FLAGS, as_given
from blocktable._cache_layout import COPIES
from blocktable._journal import DUE, JournalFull, is_usual, is_usual_admit
from blocktable.delta import Delta
from blocktable.errors import BlockTableError, ConcurrentUse, OutOfBlocks
from blocktable.recording.arguments import cut, exact, fields_of, least, one_of, unknown_of, whole
from blocktable.recording.format import NONE, of_text
from blocktable.recording.identity import SEEN, USED, Identity, Ints
from blocktable.recording.pending import Pending
from blocktable.recording.shapes import describe_group
from blocktable.sanitize.reading import Unreadable
from blocktable.tables import BlockTables

V = TypeVar("V", bound=Callable[..., Any])
_NOTHING = object()  # what a refused call returns


def all_or_none(verb: V) -> V:
    """Have an exception that is no refusal end the recording: a signal handler's leaves it open whether the call was done."""

    @wraps(verb)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return verb(self, *args, **named)
        except BlockTableError:
            raise
        except BaseException as error:
            began = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if began and self._recorder is not None:  # else they are no arguments of the verb
                self._recorder.give_up(error)
            raise

    return cast("V", run)


class Recorded:
    """What every recorded object has."""

    _recorder: Any = None
    _number = 0
    _identity: Identity | None = None
    _pending: Pending | None = None
    # Of the class that is recorded:
    _plain_commit: Any
    _plain_lookup: Any
    _plain_admit: Any
    _plain_extend: Any
    _plain_free: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for recorder in _sanitized.RECORDERS[-1:]:  # another thread may close it meanwhile
            recorder.begin(self)

    def _shown(self) -> bytes:
        """Return a snapshot, at which no sanitizer looks: it does not know yet of the commit that is being recorded."""
        shown: bytes = super().snapshot()  # type: ignore[misc]
        return shown

    @all_or_none
    def commit(self) -> Delta:
        """Do it, and record it."""
        delta: Delta = self._plain_commit()
        if self._recorder is not None:
            self._recorder.committed(self._number, delta)
        return delta


class RecordedTables(Recorded):
    """Comes before ``BlockTables`` in the class of recorded ones."""

    @all_or_none
    def resize(self, groups: Any) -> None:
        """Do it, and record it."""
        super().resize(groups)  # type: ignore[misc]
        shapes = msgspec.msgpack.encode([describe_group(group) for group in self.groups])  # type: ignore[attr-defined]
        if self._recorder is not None:
            self._recorder.write("resize", self._number, [of_text(shapes)])

    @all_or_none
    def _do(self, verb: str, call: Callable[[], None], given: Sequence[Any]) -> None:
        """Do a verb of these arguments, and record it."""
        fields = None
        with suppress(Unreadable):  # refused, and not to be done again
            fields = fields_of(given)  # now: they may be views of what changes
        try:
            call()
        except BlockTableError as error:
            if self._recorder is not None and fields is not None and not isinstance(error, ConcurrentUse):
                self._recorder.write(verb, self._number, fields, refused=error)
            raise
        if self._recorder is not None:
            self._recorder.write(verb, self._number, fields)


def _tables_verb(verb: str) -> Callable[..., None]:
    parameters = signature(getattr(BlockTables, verb))

    def recorded_verb(self: Any, *args: Any, **named: Any) -> None:
        real = getattr(super(RecordedTables, self), verb)
        _, *given = parameters.bind(self, *args, **named).arguments.values()
        self._do(verb, partial_of(real, *args, **named), given)

    recorded_verb.__name__ = verb
    return recorded_verb


for _name in ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy"):
    setattr(RecordedTables, _name, _tables_verb(_name))


class RecordedCache(Recorded):
    """Comes before ``KVCache`` in the class of recorded ones."""

    def commit(self) -> Delta:
        """Do it, and record it."""
        pending = self._pending  # another thread may close the recorder meanwhile
        if pending is None:
            return super().commit()
        try:
            try:
                delta: Delta = self._plain_commit()
            except JournalFull as full:
                delta = pending.again(full.numbers, self._plain_commit)
        except BlockTableError:
            raise
        except BaseException as error:
            if self._meta[COPIES]:  # type: ignore[attr-defined]  # it may be done, and is not noted
                self._recorder.give_up(error)
            raise
        if pending.journal[DUE] or perf_counter() > pending.until:
            pending.flush()
        return delta

    @all_or_none
    def _call(self, verb: str, args: Any, named: Any, told: Callable[[Any], list[Any]]) -> Any:
        """Run a verb and record it: ``told`` returns its fields, given what it returned, _NOTHING if refused."""
        try:
            result = getattr(super(), verb)(*args, **named)
        except BlockTableError as error:
            self._tell(verb, told, _NOTHING, error)
            raise
        self._tell(verb, told, result, None)
        return result

    def _note(self, verb: str, call: Callable[[], Any], told: Callable[[Any], list[Any]]) -> Any:
        """Run a verb that notes itself, done or short of blocks; another refusal is told."""
        pending = self._pending
        if pending is None:  # another thread closed the recorder
            return call()
        try:
            try:
                result = call()
            except JournalFull as full:
                result = pending.again(full.numbers, call)
        except OutOfBlocks:
            pending.flush_due()
            raise
        except BlockTableError as error:
            self._tell(verb, told, _NOTHING, error)
            raise
        pending.flush_due()
        return result

    def _tell(self, verb: str, told: Callable[[Any], list[Any]], result: Any, refused: BlockTableError | None) -> None:
        if self._recorder is None or self._recorder.closed or isinstance(refused, ConcurrentUse):
            return  # what was refused beside another call is not refused when it is run again by itself
        if self._pending is not None:
            self._pending.flush()  # what was done before is written before
        if self._identity is not None:
            self._identity.follow(self.lengths, self.final)  # type: ignore[attr-defined]
        try:
            fields = told(result)
        except Unreadable:
            return  # no arrays that belong together: refused, and not to be done again
        self._recorder.write(verb, self._number, fields, None if refused else result, refused)

    def _finished(self, rows: Ints) -> list[Any]:
        """Return the units that have become final, as two fields."""
        found = None if self._identity is None else self._identity.finished(rows)
        return [None, None] if found is None else list(found)

    def lookup(self, indptr: Any, tokens: Any, salts: Any = None) -> Any:
        """Do it, and record it."""

        def told(_: Any) -> list[Any]:
            starts, text = cut(indptr, exact(tokens))
            return [np.diff(starts), *self._prompts(starts, text, salts), self._recorder.tokens(text)]

        if self._pending is None or salts is not None:
            return self._call("lookup", (indptr, tokens, salts), {}, told)
        return self._note("lookup", lambda: self._plain_lookup(indptr, tokens), told)

    def match(self, rows: Any, indptr: Any, tokens: Any, salts: Any = None) -> Any:
        """Do it, and record it."""

        def told(cached: Any) -> list[Any]:
            opened = exact(rows)
            starts, text = cut(indptr, exact(tokens), opened)
            fields = [opened, np.diff(starts), *self._prompts(starts, text, salts)]
            if cached is _NOTHING:
                return fields
            self._opened(opened, starts, text, cached, cached, salts)
            return [*fields, cached, *self._finished(opened), self._recorder.tokens(text)]

        return self._call("match", (rows, indptr, tokens, salts), {}, told)

    @all_or_none
    def admit(
        self,
        rows: Any,
        indptr: Any,
        tokens: Any,
        salts: Any = None,
        limit: Any = None,
        *,
        final: Any = None,
        headroom: int = 0,
    ) -> Any:
        """Do it, and record it."""

        def told(result: Any) -> list[Any]:
            opened = exact(rows)
            starts, text = cut(indptr, exact(tokens), opened)
            one = np.ndim(limit) == 0
            limits = None if limit is None else np.array(least(limit)) if one else exact(limit)
            marks = None if final is None else exact(final)
            numbers = np.array([*least(headroom), int(one)])
            fields = [opened, np.diff(starts), *self._prompts(starts, text, salts)]  # last: it numbers units
            fields += [limits, marks, numbers]
            if result is _NOTHING:
                return fields
            cached = result[0]
            self._opened(opened, starts, text, cached, self.lengths[opened], salts)  # type: ignore[attr-defined]
            return [*fields, cached, *self._finished(opened), self._recorder.tokens(text)]

        if self._pending is None or not is_usual_admit(salts, limit, final):
            limit, final = as_given(limit), as_given(final)
            named = {"final": final, "headroom": headroom}
            return self._call("admit", (rows, indptr, tokens, salts, limit), named, told)
        call = partial_of(self._plain_admit, rows, indptr, tokens, None, limit, headroom=headroom)
        return self._note("admit", call, told)

    def extend(
        self,
        rows: Any,
        indptr: Any,
        tokens: Any = None,
        *,
        final: Any = None,
        salts: Any = None,
        partial: bool = False,
        headroom: int = 0,
    ) -> Any:
        """Do it, and record it."""
        pending = self._pending
        if pending is None or not is_usual(final, salts, partial, headroom):
            named = {"final": as_given(final), "salts": salts, "partial": partial, "headroom": headroom}
            told = partial_of(self._told_extend, rows, indptr, tokens, **named)
            return self._call("extend", (rows, indptr, tokens), named, told)
        try:
            slots = self._plain_extend(rows, indptr, tokens)
        except JournalFull as full:
            slots = pending.again(full.numbers, lambda: self._plain_extend(rows, indptr, tokens))
        except BlockTableError as error:
            self._tell("extend", partial_of(self._told_extend, rows, indptr, tokens), _NOTHING, error)
            raise
        if pending.journal[DUE]:  # as ``flush_due`` does, without its call: every step comes here
            pending.flush()
        return slots

    def _told_extend(
        self,
        rows: Any,
        indptr: Any,
        tokens: Any,
        result: Any,
        *,
        final: Any = None,
        salts: Any = None,
        partial: bool = False,
        headroom: int = 0,
    ) -> list[Any]:
        """Return the fields of an extend."""
        wanted = exact(rows)
        starts, text = cut(indptr, tokens, wanted)
        unknown = np.array([-1]) if tokens is None else unknown_of(text)
        marks = None if final is None else exact(final)
        fields = [wanted, np.diff(starts), unknown, marks, self._recorder.salts(salts, wanted.size)]
        if result is not _NOTHING and not partial:
            result = (result, wanted.size)
        served = result[1] if result is not _NOTHING else 0
        if not isinstance(partial, FLAGS):
            raise Unreadable
        fields.append(np.array([int(partial), *least(headroom), served]))
        if result is _NOTHING:
            return fields
        done = wanted[:served]
        if self._identity is not None:
            for i in np.flatnonzero(self._identity.lines[done, USED] == 0).tolist():
                self._identity.open(int(done[i]), salts[i] if salts else None, NONE)
            before = self.lengths[done] - np.diff(starts)[:served]  # type: ignore[attr-defined]
            self._identity.write(done, before, starts[: served + 1], text)
        return [*fields, *self._finished(done), self._recorder.tokens(text)]

    def confirm(self, rows: Any, lengths: Any, indptr: Any = None, tokens: Any = None) -> None:
        """Do it, and record it."""
        before = self.final.copy()  # type: ignore[attr-defined]
        lengths = as_given(lengths)

        def told(result: Any) -> list[Any]:
            wanted, marks = exact(rows), exact(lengths)
            fields: list[Any] = [wanted, marks, None, None]
            text = NONE
            if (indptr is None) != (tokens is None):
                raise Unreadable
            if tokens is not None:
                starts, text = cut(indptr, tokens, wanted)
                fields = [wanted, marks, np.diff(starts), unknown_of(text)]
            if result is _NOTHING:
                return fields
            if tokens is not None and self._identity is not None:
                for i, row in enumerate(wanted.tolist()):
                    self._identity.confirm(row, int(before[row]), text[starts[i] : starts[i + 1]])
            return [*fields, *self._finished(wanted), self._recorder.tokens(text)]

        self._call("confirm", (rows, lengths, indptr, tokens), {}, told)

    def truncate(self, rows: Any, lengths: Any, fence: int | None = None) -> None:
        """Do it, and record it."""
        lengths = as_given(lengths)

        def told(result: Any) -> list[Any]:
            wanted, ends = exact(rows), exact(lengths)
            if result is None and self._identity is not None:
                for row in wanted.tolist():
                    self._identity.cut(row, int(self.final[row]))  # type: ignore[attr-defined]
            return [wanted, ends, one_of(fence)]

        self._call("truncate", (rows, lengths, fence), {}, told)

    def free(self, rows: Any, fence: int | None = None) -> None:
        """Do it, and record it."""

        def told(result: Any) -> list[Any]:
            wanted = exact(rows)
            if result is None and self._identity is not None:
                self._identity.close(wanted)
            return [wanted, one_of(fence)]

        if self._pending is None or fence is not None:
            self._call("free", (rows, fence), {}, told)
        else:
            self._note("free", lambda: self._plain_free(rows), told)

    def retire(self, n: int) -> None:
        """Do it, and record it."""
        self._call("retire", (n,), {}, lambda _: [np.array([whole(n)])])

    def fork(self, row: int, into: int) -> None:
        """Do it, and record it."""

        def told(result: Any) -> list[Any]:
            if result is None and self._identity is not None:
                self._identity.fork(row, into)
            return [np.array([whole(row), whole(into)])]

        self._call("fork", (row, into), {}, told)

    def reset_prefix(self) -> None:
        """Do it, and record it."""
        self._call("reset_prefix", (), {}, lambda _: [])

    def _prompts(self, starts: Ints, text: Ints, salts: Any) -> list[Any]:
        """Return fields: the prompts' whole units, counted back, where tokens are not known, and the salts."""
        units, unknown, named = None, unknown_of(text), self._recorder.salts(salts, starts.size - 1)
        if self._identity is not None:
            seen = int(self._identity.counts[SEEN])
            parts = [
                self._identity.units(text[starts[i] : starts[i + 1]], salts[i] if salts else None)
                for i in range(starts.size - 1)
            ]
            units = np.concatenate(parts) - seen if parts else None
        return [units, unknown, named]

    def _opened(self, rows: Ints, starts: Ints, text: Ints, cached: Any, ends: Any, salts: Any) -> None:
        """Follow rows opened on what was found cached of their prompts."""
        if self._identity is None:
            return
        for i, row in enumerate(rows.tolist()):
            prompt, hit = text[starts[i] : starts[i + 1]], int(cached[i])
            self._identity.open(row, salts[i] if salts else None, prompt[:hit])
            rest = prompt[hit : int(ends[i])]
            self._identity.write(np.array([row]), np.array([hit]), np.array([0, rest.size]), np.ascontiguousarray(rest))


USUAL = ("commit", "lookup", "admit", "extend", "free")


@cached_by
def recorded(cls: Any) -> Any:
    """Return the class that does what ``cls`` does and is recorded; what nobody calls directly stays as it is."""
    if issubclass(cls, Recorded):
        return cls
    for base in cls.__mro__:
        place = f"{base.__module__}.{base.__qualname__}"
        if place in (
            "blocktable.cache.CacheTables",
            "blocktable.replica.Replica",
            "blocktable.device.tables.DeviceTables",
        ):
            return cls
        mixin = {"blocktable.cache.KVCache": RecordedCache, "blocktable.tables.BlockTables": RecordedTables}.get(place)
        if mixin is not None:
            # Those of every step go without super(), which costs as much as what they do here.
            return _sanitized.joined(
                cls, base, mixin, **{f"_plain_{verb}": getattr(base, verb, None) for verb in USUAL}
            )
    return cls
