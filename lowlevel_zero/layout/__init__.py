"""The layout of an optimizer: the elements that each rank owns, their places in buckets, and the bytes of a rank.

It reads records, sharded groups and options; the optimizer's ``layout()`` and ``memory_held()`` return what it finds.

=======  ==============================================================================================================
records  the layout of parameters and buckets, as records, text and JSON
held     bytes by owner: those that a rank holds now, and those of one parameter by arithmetic
text     tables, and amounts in units of their size
=======  ==============================================================================================================
"""

from .held import Held
from .records import Layout

__all__ = ["Held", "Layout"]
