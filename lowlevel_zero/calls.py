"""Where ``Call`` was; it is in ``agreement``."""

from .communication.agreement import Call as Call
