"""Where ``Call`` was; it is in ``agreement``."""

from .agreement import Call as Call
