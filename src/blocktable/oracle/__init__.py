"""Plain-Python models of the fast parts: slow, obvious, and written from their meaning alone.

Drive one beside the real object and compare after every call; ``blocktable``'s own tests do, and a test of another backend
can. Lists in, lists out; nothing here shares code with what it checks.
"""

from blocktable.oracle.tables import Refused, TablesModel

__all__ = ["Refused", "TablesModel"]
