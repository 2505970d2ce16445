"""Optimizers: which may be stepped on slices, and those whose steps take whole tensors, by the ranks together.

Its seam is ``whole_step(optimizer, parameters)``: how the stepper steps all slices at once.
"""

from .lamb import Lamb

__all__ = ["Lamb"]
