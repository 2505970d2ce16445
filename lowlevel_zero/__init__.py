"""Per-parameter, evenly-split ZeRO stage 1 and 2 for PyTorch."""

from .deepspeed.config import options_from_deepspeed
from .optimizer import LowLevelZeroOptimizer
from .version import __version__

__all__ = ["LowLevelZeroOptimizer", "__version__", "options_from_deepspeed"]
