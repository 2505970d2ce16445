"""The accessors of ``lowlevel_zero.deepspeed``, under the path at which they were first."""

from .deepspeed.accessors import *  # noqa: F403
