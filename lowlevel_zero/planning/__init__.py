"""Planning: the bytes that a rank will hold, who owns what, and the command line.

Hangs on an optimizer's records and bucket plans: ``optimizer.layout()`` and ``optimizer.memory_held()`` read
``optimizer.sharded_parameters`` and ``optimizer.sharded_groups``.
"""

from .layout import Layout
from .memory import Estimate, estimate

__all__ = ["Estimate", "Layout", "estimate"]
