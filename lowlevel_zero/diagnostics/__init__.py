"""Diagnostics find ranks that are missing or differ, parameters that have changed hands, and the source of inf and NaN.

The optimizer calls them; they read records and sharded groups. Every collective begins and is waited for through
``ShardGroup.progress``: the stall report reads it from a thread of its own, and the debug checks put one in its place
that compares the ranks first.
"""
