"""Per-parameter, evenly-split ZeRO stage 1 and 2 for PyTorch."""

from .clipping import clip_grad_norm_, clip_grad_value_
from .construction.start_line import set_up as _set_up
from .deepspeed.config import options_from_deepspeed
from .optimizer import LowLevelZeroOptimizer
from .options import Communication, Diagnostics, LossScale

__all__ = [
    "Communication",
    "Diagnostics",
    "LossScale",
    "LowLevelZeroOptimizer",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "options_from_deepspeed",
]

__version__ = "0.1.0"

_set_up()
