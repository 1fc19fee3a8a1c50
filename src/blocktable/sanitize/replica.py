"""Sanitized replicas: what a delta says is done once more, span by span, and compared."""

from typing import Any

from blocktable.delta import Delta
from blocktable.errors import BlockTableError, ConcurrentUse
from blocktable.sanitize.findings import Report, caller
from blocktable.sanitize.laws import Broken, Unit, rows_broken
from blocktable.sanitize.reading import Looks, Reading
from blocktable.sanitize.shadow import Shadow


class ReplicaSanitizer(Looks):
    """The shadow of tables that only deltas change."""

    def __init__(self, replica: Any, report: Report) -> None:
        self.report = report
        units = [Unit.of(g, shape, replica.num_blocks) for g, shape in enumerate(replica.shapes)]
        self.shadow = Shadow(units, replica.max_rows, report)
        self.shadow.show(replica.tables)
        self.shadow.step = replica.seq
        self._follow()

    def _follow(self) -> None:
        self.shadow.follow()
        self.shadow.sent[:], self.shadow.sent_counts[:] = self.shadow.flat, self.shadow.counts
        self.shadow.pending, self.shadow.pending_rows, self.shadow.pending_size = [], [], 0

    def applied(self, delta: Delta) -> None:
        """Compare the tables with what a delta makes of them (L11), and the rows it touched with the laws."""
        shadow = self.shadow
        if delta.seq != shadow.step + 1 and shadow.step:
            shadow.find(Broken("L11", f"delta {delta.seq} is applied to a replica at {shadow.step}"))
        for broken in shadow.apply(delta):
            shadow.find(broken)
        at = [part for part in shadow.pending if part.size]
        for part in at:
            shadow.flat[part] = shadow.sent[part]
            shadow.touched[part] = shadow.log.last
        for group, rows in shadow.pending_rows:
            shadow.counts[group, rows] = shadow.sent_counts[group, rows]
        for part in at:
            shadow.compare_places(part)
        for group, rows in shadow.pending_rows:
            for broken in rows_broken(
                shadow.units[group], shadow.entries[group][rows], shadow.counts[group, rows], rows
            ):
                shadow.find(broken)
        shadow.sweep()
        shadow.pending, shadow.pending_rows, shadow.pending_size = [], [], 0
        shadow.step = delta.seq
        if not shadow.clean:
            self._follow()


class SanitizedReplica(Reading):
    """Comes before ``Replica`` in the class of sanitized ones."""

    _made: ReplicaSanitizer | None = None
    _sanitize: Any = None

    def __init__(self, *args: Any, sanitize: Any = None, **named: Any) -> None:
        self._sanitize = sanitize
        super().__init__(*args, **named)

    @property
    def sanitizer(self) -> ReplicaSanitizer:
        """The shadow, made at the first call, however the replica was started."""
        if self._made is None:
            self._made = ReplicaSanitizer(self, Report.of(self._sanitize))
        return self._made

    def apply(self, delta: Delta) -> None:
        """Do what the replica does, and look at the result."""
        sanitizer = self.sanitizer
        sanitizer.shadow.begin("apply", caller(1))
        try:
            super().apply(delta)  # type: ignore[misc]
        except ConcurrentUse:
            raise
        except BlockTableError:
            sanitizer.shadow.sweep("a refused delta left a trace")
            raise
        sanitizer.applied(delta)
