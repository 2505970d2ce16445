"""Planning: the bytes that a rank will hold, the time of a step, and the command line.

It reads checkpoints and options; ``lowlevel_zero.layout`` tells what an optimizer holds now.
"""

from .memory import Estimate, estimate

__all__ = ["Estimate", "estimate"]
