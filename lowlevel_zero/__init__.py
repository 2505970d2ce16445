"""Per-parameter, evenly-split ZeRO stage 1 and 2 for PyTorch."""

from .optimizer import LowLevelZeroOptimizer

__version__ = "0.1.0"

__all__ = ["LowLevelZeroOptimizer", "__version__"]
