"""The optimizer's state for its callers: whole, as plain torch has it, and sharded, for torch.distributed.checkpoint.

Hangs on ``optimizer.sharded_parameters`` and ``optimizer.sharded_groups``, which it reads.
"""
