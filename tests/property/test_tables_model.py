"""Host tables, deltas and replicas against the plain-Python model: `blocktable.testing.TablesMachine` on `BlockTables`."""

from hypothesis import settings

from blocktable.testing.tables_machine import TablesMachine

TestTables = TablesMachine.TestCase
TestTables.settings = settings(
    max_examples=8 * settings.default.max_examples,
    stateful_step_count=max(48, settings.default.stateful_step_count),
)
