"""Backends: interchangeable ways of bringing buffers to other ranks.

How to add one: derive from ``Backend`` and write its collectives, of which an all-reduce is made if it has none; or
derive from ``HostBackend``, if it carries host messages too, and write ``trade`` and ``gather``. Choose it in
``shard_group.py``, which alone knows where which one is fast.
"""
