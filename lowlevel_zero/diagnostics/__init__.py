"""Diagnostics find ranks that are missing or differ, parameters that have changed hands, and the source of inf and NaN.

The optimizer calls them; they read records and sharded groups. Every collective begins and is waited for through
``ShardGroup.progress``, which the stall report reads from a thread of its own.
"""
