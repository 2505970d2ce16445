"""Gradients between backward and step: what ``p.grad`` is then, and how torch and trainers take norms of it and clip.

Hangs on ``ShardedParameter.handle``, which a record shows as ``p.grad`` once its gradient has been reduced; without
one, ``p.grad`` is None then.
"""
