"""The commands of ``python -m lowlevel_zero``."""
