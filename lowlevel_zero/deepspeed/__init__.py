"""DeepSpeed's JSON as keywords of the optimizer, and its accessors to one parameter's values.

They use the optimizer's public methods and its records, ``optimizer.sharded_parameters``.
"""

from . import accessors
from .accessors import *  # noqa: F403
from .config import options_from_deepspeed

__all__ = ["options_from_deepspeed"]
__all__ += accessors.__all__
