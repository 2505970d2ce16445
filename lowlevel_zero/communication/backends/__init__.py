"""Backends: interchangeable ways of bringing buffers to other ranks.

How to add one: derive from ``Backend`` (or ``HostBackend``, if it carries host messages too), write its five
collectives, and choose it in ``shard_group.py``, which alone knows where which one is fast.
"""
