"""Optimizers: how their parameters are split, 8-bit states, and the modes of schedule-free ones."""
