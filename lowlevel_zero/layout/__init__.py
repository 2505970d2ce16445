"""The layout of an optimizer: the elements that each rank owns, their places in buckets, and the bytes of a rank.

``layout_of``, ``memory_held`` and ``traffic_of`` take a ``LowLevelZeroOptimizer``, on one rank or on all: none of them
communicates.

=======  ==============================================================================================================
held     the bytes that a rank holds by owner, and the bytes that it has sent
records  the layout of parameters and buckets, as records, text and JSON
text     tables, and amounts in units of their size
=======  ==============================================================================================================
"""

from .held import Held, memory_held, traffic_of
from .records import Layout, layout_of

__all__ = ["Held", "Layout", "layout_of", "memory_held", "traffic_of"]
