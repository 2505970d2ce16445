"""Planning: the bytes that a rank will hold, who owns what, and the command line.

Hangs on the records and plans that ``optimizer.layout()`` and ``optimizer.memory_held()`` hand over.
"""

from .layout import Layout
from .memory import Estimate, estimate

__all__ = ["Estimate", "Layout", "estimate"]
