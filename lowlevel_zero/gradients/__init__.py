"""Gradients between backward and step: the sharded ``p.grad``, its norms and edits, and calls that ranks make together.

A record shows its ``ShardedParameter.handle`` as ``p.grad`` once its gradient has been reduced.
"""
