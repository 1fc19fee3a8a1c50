"""The flight recorder: each call of a cache or of tables, written when it is done, with a checksum of what it returned.

with recording.record("run.btr"):
    cache = KVCache(...)          # whatever is constructed here is recorded
"""

import os
from atexit import register, unregister
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache as cached_by
from functools import partial as partial_of
from functools import wraps
from inspect import signature
from pathlib import Path
from threading import Lock, RLock
from time import perf_counter
from typing import Any, Self, TypeVar, cast

import msgspec
import numpy as np

from blocktable import _sanitized
from blocktable._arrays import FLAGS, as_count, as_int64
from blocktable._cache_layout import COPIES, NO_LIMIT
from blocktable._ints import lcm
from blocktable._journal import ADMIT, DUE, FREE, LOOKUP, JournalFull, is_usual
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, BlockTableError, ConcurrentUse, OutOfBlocks
from blocktable.groups import Group
from blocktable.recording import coding
from blocktable.recording.format import KINDS, NONE, REFUSED, of_text
from blocktable.recording.identity import SEEN, USED, Identity, Ints
from blocktable.recording.pending import NO_SLOTS, Pending
from blocktable.recording.steps import SEATS
from blocktable.recording.writer import Writer
from blocktable.sanitize.reading import Unreadable

V = TypeVar("V", bound=Callable[..., Any])
VERSION = 2
_NOTHING = object()  # what a refused call returns
_SHAPE = (
    *("max_model_len", "lookahead", "extra_blocks", "block_size", "kernel_block_size"),
    *("min_blocks", "width", "kernel_width", "padding", "cp_size", "cp_interleave"),
)


def record(path: str | Path, *objects: Any, ring: int | None = None, tokens: bool = False) -> "Recorder":
    """Begin a recording of what is constructed until it is closed (``KVCache``, ``BlockTables``, watchers), and of those given.

    Parameters
    ----------
    path
        The file; it is begun anew.
    objects
        Objects made before, in which nothing has happened yet.
    ring
        Bytes that the calls of the recording may take at most, its older half in ``path`` + ".old", beside what each half
        begins with: the shapes and the tables as they are. A ring holds the last steps, with the entries that changed: it
        shows what rows held, and is not run again.
    tokens
        Also keep the tokens of calls, through a permutation whose key is made up now and kept nowhere: equal tokens stay
        equal, and which ones they are is not in the file. Without it nothing of the text is, but which prefixes are equal.

    Returns the recorder: ``close`` it, or use it in a ``with``. Raises ArgumentError for a file that cannot be written, and
    for an object that has been used. Cost: a few microseconds per step, see docs/recording.md.

    >>> import blocktable, tempfile
    >>> from blocktable import recording
    >>> file = tempfile.NamedTemporaryFile()
    >>> with recording.record(file.name) as recorder:
    ...     cache = blocktable.KVCache([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
    ...     _ = cache.admit([0], [0, 6], [5, 6, 7, 8, 9, 10])
    ...     _ = cache.commit()
    >>> recording.replay(file.name).digest == recorder.digest
    True
    """
    if ring is not None:
        ring = as_count(ring, "ring", 4096, 2**62)
    for n, one in enumerate(objects):
        refuse_used(one)
        if any(one is other for other in objects[:n]):
            raise ArgumentError(
                f"a {type(one).__name__} is given twice",
                values={"type": type(one).__name__},
                remedy="give each object once",
            )
    with ExitStack() as undone:
        writer = Writer(path, ring)
        undone.callback(writer.close)
        recorder = Recorder(writer, ring=ring is not None, tokens=tokens)
        undone.callback(recorder.end)
        register(recorder.flush)
        for one in objects:
            recorder.add(one)
        _sanitized.RECORDERS.append(recorder)
        undone.pop_all()  # it has begun
    return recorder


class Recorder:
    """A recording in progress."""

    def __init__(self, writer: Writer, *, ring: bool, tokens: bool) -> None:
        self.writer, self._ring = writer, ring
        self._key = np.random.default_rng().integers(1, 2**31, 4) | 1 if tokens else None
        self._objects: list[Any] = []
        self._salts: dict[bytes, int] = {}
        self._before: dict[tuple[int, int], tuple[Ints, Ints]] = {}  # the last call of each kind and object
        self._usual = not ring and not tokens  # may usual calls of caches wait, and be written together
        self._pending: dict[int, Pending] = {}
        self.lock, self.whole = Lock(), Whole(self)  # objects of several threads may share a recorder
        self.closed = False
        self._name, self._halves = os.urandom(8), 0  # of a ring, by which its halves are known
        with self.whole:
            self._say_begin()

    @property
    def digest(self) -> str:
        """A digest of everything that calls have returned so far; a replay gives the same."""
        self.flush()
        return digest_of(self.writer.meta)

    def add(self, one: Any) -> None:
        """Record an object in which nothing has happened yet."""
        if self.closed:
            raise ArgumentError(
                f"the recording {self.writer.path} is closed",
                values={"path": str(self.writer.path)},
                remedy="begin another one",
            )
        refuse_used(one)
        made = recorded(_sanitized.plain(type(one)))
        if hasattr(one, "sanitizer"):
            made = _sanitized.chosen(made, sanitize=True)
        one.__class__ = made
        self.begin(one)

    def begin(self, one: Any) -> int:
        """Write what an object was made with; return its number. What another thread closed meanwhile takes nothing."""
        with self.lock, self.whole:
            number = len(self._objects)
            if self.closed:
                return number
            self._objects.append(one)
            one._recorder, one._number = self, number  # noqa: SLF001 - what the recorded class keeps
            one._identity = identity = None if self._ring else _identity(one)  # noqa: SLF001
            if self._usual and hasattr(one, "final"):
                one._pending = Pending(self, number, identity, one)  # noqa: SLF001
                self._pending[number] = one._pending  # noqa: SLF001
            self.writer.say(["object", number, describe(one)])
        return number

    def write(
        self, verb: str, number: int, fields: Sequence[Any], result: Any = None, refused: BlockTableError | None = None
    ) -> None:
        """Write a call: the fields of what it was given, and a checksum of what it returned or was refused with."""
        if refused is not None:
            result, fields = refusal_of(refused), [*fields, refusal_of(refused)]
        kind = KINDS[verb] | (REFUSED if refused is not None else 0)
        given = [field for field in fields if field is not None]
        values = np.concatenate(given) if given else NONE
        sizes = np.array([coding.NOT_GIVEN if field is None else field.size for field in fields], np.int64)
        with self.lock, self.whole:
            if self.closed:
                return
            writer = self.writer
            fold(writer.meta, result)
            writer.room(coding.room(values.size, sizes.size))
            usual = self._pending.get(number) if kind in SEATS else None  # which has the last such call
            before = usual.last(kind) if usual else self._before.get((kind, number), (NONE, NONE))
            coding.write_call(writer.window, writer.meta, kind, number, values, sizes, *before)
            if usual:
                usual.keep(kind, values, sizes)
            else:
                self._before[kind, number] = values, sizes
            self._turn()

    def committed(self, number: int, delta: Delta) -> None:
        """Write a commit: of a ring the whole delta, else a checksum of it."""
        if not self._ring:
            self.write("commit", number, [], delta)
            return
        with self.lock, self.whole:
            if not self.closed:
                self.writer.say(["commit", number, delta.to_bytes()])
                self._turn()

    def flush(self) -> None:
        """Write the calls that wait; a finding of the sanitizer, closing, and the end of the program do it too."""
        self._flush(wait=True)

    def _flush(self, *, wait: bool) -> None:
        with ExitStack() as every:  # those behind one that cannot be written are written too
            for pending in reversed(list(self._pending.values())):
                every.callback(pending.flush, wait=wait)

    def give_up(self, why: BaseException) -> None:
        """End the recording, since a call may have been done that it does not hold; those before it are in the file."""
        if self.closed:
            return
        why.add_note(f"the recording {self.writer.path} ends here: whether the call was done, it cannot tell")
        try:
            with suppress(ConcurrentUse):  # of a cache that is in a call; nobody waits for it while this is raised
                self._flush(wait=False)
        finally:
            with self.lock:
                self.end()

    def end(self) -> None:
        """Write nothing more; again, do what was left of it."""
        self.closed = True
        with suppress(ValueError):
            _sanitized.RECORDERS.remove(self)
        unregister(self.flush)
        self._let_go()
        self.writer.close()

    def hold(self, stack: ExitStack) -> None:
        """Let nobody read what calls left until ``stack`` is closed."""
        for pending in list(self._pending.values()):
            stack.callback(_let_read, pending.reading)  # first, so that none stays held
            pending.reading.acquire()

    def leave(self) -> None:
        """Write nothing in a process forked from the one that records: the file is that one's."""
        self.lock, self.closed = Lock(), True
        unregister(self.flush)
        self._let_go()
        self.writer.leave()

    def _let_go(self) -> None:
        for pending in self._pending.values():
            pending.let_go()

    def _turn(self) -> None:
        """Begin the other half of a ring, where this one is full."""
        if not self.writer.full():
            return
        self.writer.turn()
        self._before.clear()
        self._say_begin()
        for other, one in enumerate(self._objects):
            self.writer.say(["object", other, describe(one)])
            if hasattr(one, "snapshot"):
                self.writer.say(["snapshot", other, one._shown()])  # noqa: SLF001 - as above

    def _say_begin(self) -> None:
        self._halves += 1
        self.writer.say(["begin", VERSION, *([1, self._name, self._halves] if self._ring else [0])])

    def salts(self, salts: Any, n: int) -> Ints | None:
        """Return salts as numbers in the order in which they were first seen, 0 for none, -1 for an empty one."""
        if salts is None:
            return None
        if isinstance(salts, (bytes, str)) or not isinstance(salts, Sequence) or len(salts) != n:
            raise Unreadable
        if not all(salt is None or isinstance(salt, bytes) for salt in salts):
            raise Unreadable
        known = self._salts
        numbers = [0 if salt is None else known.setdefault(salt, len(known) + 1) if salt else -1 for salt in salts]
        return np.array(numbers, np.int64)

    def tokens(self, text: Ints) -> Ints | None:
        """Return what is kept of the tokens of a call, beside which prefixes are equal."""
        return None if self._key is None else permuted(text, self._key)

    def close(self) -> None:
        """End the recording."""
        self.flush()
        with self.lock, self.whole:
            if not self.closed:
                self.writer.say(["end", digest_of(self.writer.meta)])
            self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Whole:
    """Ends a recording at an error while its file is written, which holds what was written until then."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._recorder.end()


def _let_read(reading: RLock) -> None:
    with suppress(RuntimeError):  # it was not taken
        reading.release()


_FORKING = ExitStack()
"""What is held while a process forks, so that its child finds nobody reading what calls left."""


def _before_fork() -> None:
    for recorder in _sanitized.RECORDERS:
        recorder.hold(_FORKING)


def _leave_all() -> None:
    _FORKING.close()
    for recorder in _sanitized.RECORDERS:
        recorder.leave()
    _sanitized.RECORDERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_FORKING.close, after_in_child=_leave_all)


def permuted(tokens: Ints, key: Any) -> Ints:
    """Return tokens under a keyed permutation of 0 .. 2**31 - 1, and of what lies above; -1 stays."""
    low = tokens % 2**31  # of a larger one the upper part stays
    found = low.copy()
    for odd, shift in zip(key.tolist(), (15, 13, 16, 14), strict=True):
        found = found * odd % 2**31
        found ^= found >> shift
    return np.where(tokens < 0, -1, tokens - low + found)


def describe(one: Any) -> dict[str, Any]:
    """Return what an object was made with, as plain numbers."""
    if hasattr(one, "kernel_blocks"):
        return {
            "watch": 1,
            "groups": [describe_group(group) for group in one.groups],
            "num_blocks": one.num_blocks,
            "cp_rank": one.cp_rank,
            "ignore": sorted(one.ignore),
            "kernel_blocks": one.kernel_blocks,
        }
    made = {
        "groups": [describe_group(group) for group in one.groups],
        "max_rows": one.max_rows,
        "num_blocks": one.num_blocks,
    }
    if hasattr(one, "prefix_cache"):
        made |= {"prefix_cache": one.prefix_cache, "cp_rank": one.cp_rank}
    return made


def describe_group(group: Group) -> list[Any]:
    """Return a group as its kind, window, state blocks and the numbers of its shape."""
    shape = [getattr(group.geometry, name) for name in _SHAPE]
    return [group.kind, group.window, group.state_blocks, *shape]


def digest_of(meta: Ints) -> str:
    """Return the checksum of what calls returned, as a digest."""
    return f"{int(meta[coding.SUM]):016x}"


def fold(meta: Ints, result: Any) -> None:
    """Take what a call returned into the checksum: arrays, counts, deltas, a refusal, or nothing."""
    if isinstance(result, np.ndarray) and result.ndim == 1:
        coding.fold_values(meta, result)
    elif isinstance(result, (tuple, np.ndarray)):  # of slots each group by itself, as the compiled loops do
        for part in result:
            fold(meta, part)
    elif isinstance(result, Delta):
        coding.fold_delta(meta, result.spans, result.values, result.copies)
    elif result is not None:
        coding.fold_values(meta, np.array([int(result)], np.int64))


def refusal_of(error: BlockTableError) -> Ints:
    """Return a refusal, as a field: its type and law."""
    return _refusal(type(error).__name__, error.law)


@cached_by
def _refusal(name: str, law: str) -> Ints:
    return of_text(f"{name} {law}")


def refuse_used(one: Any) -> None:
    """Refuse what is neither a cache nor tables, or has been used: a replay begins with nothing."""
    if not issubclass(recorded(_sanitized.plain(type(one))), Recorded) or _used(one):
        raise ArgumentError(
            f"a {type(one).__name__} cannot be recorded from here on",
            values={"type": type(one).__name__},
            remedy="pass a KVCache or BlockTables in which nothing has happened, or construct it while recording",
        )
    other = getattr(one, "_recorder", None)
    if other is not None and not other.closed:
        raise ArgumentError(
            f"this {type(one).__name__} is being recorded to {other.writer.path}",
            values={"type": type(one).__name__, "path": str(other.writer.path)},
            remedy="close that recording first, or construct another one",
        )


def _used(one: Any) -> bool:
    return not hasattr(one, "_is_used") or bool(one._is_used())  # noqa: SLF001


def _identity(one: Any) -> Identity | None:
    paged = [g.geometry.block_size * g.geometry.cp_size for g in one.groups if g.kind != "state"]
    if not getattr(one, "prefix_cache", False) or len(paged) != len(one.groups):
        return None
    return Identity(one.max_rows, lcm(*paged))


# ---- the classes that take the place of those constructed


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
        try:
            call()
        except BlockTableError as error:
            if self._recorder is not None and not isinstance(error, ConcurrentUse):
                with suppress(Unreadable):  # refused, and not to be done again
                    self._recorder.write(verb, self._number, fields_of(given), refused=error)
            raise
        if self._recorder is not None:
            self._recorder.write(verb, self._number, fields_of(given))


def _tables_verb(verb: str) -> Callable[..., None]:
    def recorded_verb(self: Any, *args: Any, **named: Any) -> None:
        real = getattr(super(RecordedTables, self), verb)
        given = list(signature(real).bind(*args, **named).arguments.values())
        self._do(verb, partial_of(real, *args, **named), given)

    recorded_verb.__name__ = verb
    return recorded_verb


# What an argument of a verb of tables is: so many arrays, one per group, or
ARRAY, INTEGER, NO_GROUP = -1, -2, -3


def fields_of(arguments: Sequence[Any]) -> list[Ints]:
    """Return the arguments of a verb of tables as fields: what each is, then the arrays and integers; else Unreadable."""
    what: list[int] = []
    fields: list[Ints] = []
    for argument in arguments:
        several = isinstance(argument, (tuple, list)) and not all(map(_is_integer, argument))
        parts = argument if several else [argument]
        found = [np.array([whole(part)]) if _is_integer(part) else exact(part) for part in parts if part is not None]
        if several:
            what.append(len(found))
        else:
            what.append(NO_GROUP if argument is None else INTEGER if _is_integer(argument) else ARRAY)
        fields += found
    return [np.array(what, np.int64), *fields]


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def exact(value: Any) -> Ints:
    """Return integers as tables and caches take them; Unreadable for what they refuse."""
    try:
        return as_int64(value, "")
    except ArgumentError:
        raise Unreadable from None


def whole(value: Any) -> int:
    """Return an integer as tables and caches take it; Unreadable for what they refuse."""
    if not _is_integer(value) or not -(2**63) <= value < 2**63:
        raise Unreadable
    return int(value)


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

    @all_or_none
    def lookup(self, indptr: Any, tokens: Any, salts: Any = None) -> Any:
        """Do it, and record it."""

        def told(_: Any) -> list[Any]:
            starts, text = _cut(indptr, tokens)
            return [np.diff(starts), *self._prompts(starts, text, salts), self._recorder.tokens(text)]

        pending = self._pending  # another thread may close the recorder meanwhile
        if pending is None or salts is not None:
            return self._call("lookup", (indptr, tokens, salts), {}, told)
        try:
            cached = self._plain_lookup(indptr, tokens)
        except BlockTableError as error:
            self._tell("lookup", told, _NOTHING, error)
            raise
        pending.took(LOOKUP, NONE, indptr, tokens, cached)
        return cached

    def match(self, rows: Any, indptr: Any, tokens: Any, salts: Any = None) -> Any:
        """Do it, and record it."""

        def told(cached: Any) -> list[Any]:
            opened = exact(rows)
            starts, text = _cut(indptr, tokens, opened)
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
            starts, text = _cut(indptr, tokens, opened)
            one = np.ndim(limit) == 0
            limits = None if limit is None else np.array(_least(limit)) if one else exact(limit)
            marks = None if final is None else exact(final)
            fields = [opened, np.diff(starts), *self._prompts(starts, text, salts)]
            fields += [limits, marks, np.array([*_least(headroom), int(one)])]
            if result is _NOTHING:
                return fields
            cached = result[0]
            self._opened(opened, starts, text, cached, self.lengths[opened], salts)  # type: ignore[attr-defined]
            return [*fields, cached, *self._finished(opened), self._recorder.tokens(text)]

        usual = salts is None and final is None and (limit is None or type(limit) is int)
        pending = self._pending
        if pending is None or not usual:
            named = {"final": final, "headroom": headroom}
            return self._call("admit", (rows, indptr, tokens, salts, limit), named, told)
        most = -1 if limit is None else limit
        try:
            found = self._plain_admit(rows, indptr, tokens, None, limit, headroom=headroom)
        except OutOfBlocks as error:
            pending.took(ADMIT | REFUSED, rows, indptr, tokens, refusal_of(error), NO_SLOTS, *_least(most, headroom))
            raise
        except BlockTableError as error:
            self._tell("admit", told, _NOTHING, error)
            raise
        cached, slots = found
        pending.took(ADMIT, rows, indptr, tokens, cached, slots, *_least(most, headroom))
        return found

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
            named = {"final": final, "salts": salts, "partial": partial, "headroom": headroom}
            told = partial_of(self._told_extend, rows, indptr, tokens, **named)
            return self._call("extend", (rows, indptr, tokens), named, told)
        try:
            slots = self._plain_extend(rows, indptr, tokens)
        except JournalFull as full:
            slots = pending.again(full.numbers, lambda: self._plain_extend(rows, indptr, tokens))
        except BlockTableError as error:
            self._tell("extend", partial_of(self._told_extend, rows, indptr, tokens), _NOTHING, error)
            raise
        if pending.journal[DUE]:
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
        starts, text = _cut(indptr, tokens, wanted)
        unknown = np.array([-1]) if tokens is None else _unknown(text)
        marks = None if final is None else exact(final)
        fields = [wanted, np.diff(starts), unknown, marks, self._recorder.salts(salts, wanted.size)]
        if result is not _NOTHING and not partial:
            result = (result, wanted.size)
        served = result[1] if result is not _NOTHING else 0
        if not isinstance(partial, FLAGS):
            raise Unreadable
        fields.append(np.array([int(partial), *_least(headroom), served]))
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

        def told(result: Any) -> list[Any]:
            wanted, marks = exact(rows), exact(lengths)
            fields: list[Any] = [wanted, marks, None, None]
            text = NONE
            if (indptr is None) != (tokens is None):
                raise Unreadable
            if tokens is not None:
                starts, text = _cut(indptr, tokens, wanted)
                fields = [wanted, marks, np.diff(starts), _unknown(text)]
            if result is _NOTHING:
                return fields
            if tokens is not None and self._identity is not None:
                for i, row in enumerate(wanted.tolist()):
                    self._identity.confirm(row, int(before[row]), text[starts[i] : starts[i + 1]])
            return [*fields, *self._finished(wanted), self._recorder.tokens(text)]

        self._call("confirm", (rows, lengths, indptr, tokens), {}, told)

    def truncate(self, rows: Any, lengths: Any, fence: int | None = None) -> None:
        """Do it, and record it."""

        def told(result: Any) -> list[Any]:
            wanted, ends = exact(rows), exact(lengths)
            if result is None and self._identity is not None:
                for row in wanted.tolist():
                    self._identity.cut(row, int(self.final[row]))  # type: ignore[attr-defined]
            return [wanted, ends, _one(fence)]

        self._call("truncate", (rows, lengths, fence), {}, told)

    @all_or_none
    def free(self, rows: Any, fence: int | None = None) -> None:
        """Do it, and record it."""

        def told(result: Any) -> list[Any]:
            wanted = exact(rows)
            if result is None and self._identity is not None:
                self._identity.close(wanted)
            return [wanted, _one(fence)]

        pending = self._pending
        if pending is None or fence is not None:
            self._call("free", (rows, fence), {}, told)
            return
        try:
            self._plain_free(rows)
        except BlockTableError as error:
            self._tell("free", told, _NOTHING, error)
            raise
        pending.took(FREE, rows, NONE, NONE)

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
        units, unknown, named = None, _unknown(text), self._recorder.salts(salts, starts.size - 1)
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


def _cut(indptr: Any, tokens: Any, rows: Ints | None = None) -> tuple[Ints, Ints]:
    """Return indptr and tokens, none where not known; Unreadable where they do not belong together: only sizes are recorded."""
    starts, text = exact(indptr), NONE if tokens is None else exact(tokens)
    if not starts.size or starts[0] or (tokens is not None and starts[-1] != text.size):
        raise Unreadable
    if (starts[1:] < starts[:-1]).any() or (rows is not None and starts.size != rows.size + 1):
        raise Unreadable
    if text.size and text.min() < -1:  # written as -1, which is a token that is not known
        raise Unreadable
    return starts, text


def _least(*values: Any) -> list[int]:
    """Return numbers, of which the larger ones all mean the same to a cache."""
    return [whole(min(value, NO_LIMIT)) if _is_integer(value) else whole(value) for value in values]


def _one(value: Any) -> Ints | None:
    """Return an integer as a field."""
    return None if value is None else np.array([whole(value)], np.int64)


def _unknown(text: Ints) -> Ints | None:
    """Return where tokens are -1, None where they all are known."""
    if not text.size or text.min() >= 0:
        return None
    return np.flatnonzero(text < 0)


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
            return _sanitized.joined(cls, base, mixin, {f"_plain_{verb}": getattr(base, verb, None) for verb in USUAL})
    return cls
