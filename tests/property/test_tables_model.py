"""Host tables, deltas and replicas against the plain-Python model: `blocktable.testing.TablesMachine` on `BlockTables`."""

from blocktable.testing.tables_machine import TablesMachine

TestTables = TablesMachine.TestCase
