"""The flight recorder: each call of a cache or of tables, written when it is done, with a checksum of what it returned.

with recording.record("run.btr"):
    cache = KVCache(...)          # whatever is constructed here is recorded
"""

import os
from atexit import register, unregister
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Self

import numpy as np

from blocktable import _sanitized
from blocktable._arrays import as_count
from blocktable._ints import lcm
from blocktable.cache import KVCache
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, BlockTableError, ConcurrentUse
from blocktable.recording import coding
from blocktable.recording.format import KINDS, NONE, REFUSED, refusal_of
from blocktable.recording.identity import Identity, Ints
from blocktable.recording.pending import Pending
from blocktable.recording.recorded import Recorded, RecordedCache, recorded
from blocktable.recording.shapes import describe
from blocktable.recording.steps import SEATS
from blocktable.recording.writer import Writer
from blocktable.sanitize.reading import Unreadable

VERSION = 2


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
            if self._usual and isinstance(one, RecordedCache):
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


def refuse_used(one: Any) -> None:
    """Refuse what is neither a cache nor tables, or has been used: a replay begins with nothing."""
    if not issubclass(recorded(_sanitized.plain(type(one))), Recorded) or one._is_used():  # noqa: SLF001
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


def _identity(one: Any) -> Identity | None:
    paged = [g.geometry.block_size * g.geometry.cp_size for g in one.groups if g.kind != "state"]
    if isinstance(one, KVCache) and one.prefix_cache and len(paged) == len(one.groups):
        return Identity(one.max_rows, lcm(*paged))
    return None
