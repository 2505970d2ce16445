"""Per-parameter, evenly-split ZeRO stage 1 and 2 for PyTorch."""

from .deepspeed.config import options_from_deepspeed
from .gradients.clipping import clip_grad_norm_, clip_grad_value_
from .optimizer import LowLevelZeroOptimizer
from .version import __version__

__all__ = [
    "LowLevelZeroOptimizer",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "options_from_deepspeed",
]
