"""The laws at run time: findings that name the operation, for our own tables and for anybody's.

``watch`` looks at the tables of an engine of its own, given as plain arrays at each step.
"""

from blocktable.sanitize.findings import Finding, Operation, Report
from blocktable.sanitize.watch import Watch, watch

__all__ = ["Finding", "Operation", "Report", "Watch", "watch"]
