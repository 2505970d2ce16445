"""Optimizers: which may be stepped on slices, and those whose steps need whole tensors, taken by the ranks together.

Hangs on the core by ``whole_step(optimizer, parameters)``: how the stepper steps all slices at once. LAMB, which torch
has not, is ``Lamb``; Muon is torch's own, from 2.9 on.
"""

import torch

from .lamb import Lamb

__all__ = ["Lamb"]

if hasattr(torch.optim, "Muon"):
    from torch.optim import Muon

    __all__ += ["Muon"]
