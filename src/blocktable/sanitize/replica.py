"""Sanitized replicas: what a delta says is done once more, span by span, and compared."""

from typing import Any

import numpy as np

from blocktable.delta import Delta
from blocktable.errors import BlockTableError, ConcurrentUse
from blocktable.sanitize import usual
from blocktable.sanitize.findings import Report, caller
from blocktable.sanitize.laws import Broken, Unit, rows_broken
from blocktable.sanitize.reading import Looks, Reading
from blocktable.sanitize.shadow import Shadow


class ReplicaSanitizer(Looks):
    """The shadow of tables that only deltas change."""

    def __init__(self, replica: Any, report: Report) -> None:
        self.report = report
        self._of = replica
        units = [Unit.of(g, shape, getattr(replica, "num_blocks", None)) for g, shape in enumerate(replica.shapes)]
        self.shadow = Shadow(units, replica.max_rows, report)
        self.shadow.step = replica.seq
        self._show()
        self._follow()

    def _show(self) -> None:
        self.shadow.show(self._of.tables)

    def untouched(self) -> None:
        """Look whether a refused delta has left a trace."""
        self._show()
        self.shadow.sweep("a refused delta left a trace")

    def _follow(self) -> None:
        self.shadow.follow()
        self.shadow.sent[:], self.shadow.sent_counts[:] = self.shadow.flat, self.shadow.counts
        self.shadow.pool[usual.BEHIND] = self.shadow.pool[usual.MISCOUNTED] = 0

    def applied(self, delta: Delta) -> None:
        """Compare the tables with what a delta makes of them (L11), and the rows it touched with the laws."""
        shadow = self.shadow
        self._show()
        if delta.seq != shadow.step + 1 and shadow.step:
            shadow.find(Broken("L11", f"delta {delta.seq} is applied to a replica at {shadow.step}"))
        for broken in shadow.apply(delta):
            shadow.find(broken)
        behind = np.flatnonzero(shadow.sent != shadow.flat) if shadow.pool[usual.BEHIND] else np.zeros(0, np.int64)
        shadow.flat[behind] = shadow.sent[behind]
        shadow.touched[behind] = shadow.log.last
        shadow.counts[:] = shadow.sent_counts
        shadow.pool[usual.BEHIND] = shadow.pool[usual.MISCOUNTED] = 0
        shadow.compare_places(behind)
        for group in np.unique(delta.spans[:, 0]).tolist():
            rows = np.unique(delta.spans[delta.spans[:, 0] == group, 1])
            live = shadow.counts[group, rows]
            for broken in rows_broken(shadow.units[group], shadow.entries[group][rows], live, rows):
                shadow.find(broken)
        shadow.sweep()
        shadow.step = delta.seq
        if not shadow.clean:
            self._follow()


class SanitizedFollower:
    """What sanitized replicas and device tables have in common: a shadow made when first asked for, and deltas."""

    _shadow_of: type[ReplicaSanitizer] = ReplicaSanitizer
    _made: ReplicaSanitizer | None = None
    _sanitize: Any = None

    def __init__(self, *args: Any, sanitize: Any = None, **named: Any) -> None:
        self._sanitize = sanitize
        super().__init__(*args, **named)

    @property
    def sanitizer(self) -> Any:
        """The shadow, made at the first call, however the tables were started."""
        if self._made is None:
            self._made = self._shadow_of(self, Report.of(self._sanitize))
        return self._made

    def apply(self, delta: Delta) -> None:
        """Do what the tables do, and look at the result."""
        sanitizer = self.sanitizer
        sanitizer.shadow.begin("apply", caller(1))
        try:
            super().apply(delta)  # type: ignore[misc]
        except ConcurrentUse:
            raise
        except BlockTableError:
            sanitizer.untouched()
            raise
        sanitizer.applied(delta)


class SanitizedReplica(SanitizedFollower, Reading):
    """Comes before ``Replica`` in the class of sanitized ones."""
