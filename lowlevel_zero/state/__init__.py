"""The optimizer's state for its callers: whole, as plain torch has it, and sharded, for torch.distributed.checkpoint.

======================  ===============================================================================================
whole, values           whole tensors on the host, one at a time; many of them, in few messages
boxes                   sharded tensors: a rank's slice as rectangles of the parameter's shape
sharded, global_names   an optimizer's state and settings by name, which are alike on all ranks, also of experts
======================  ===============================================================================================

Hangs on ``optimizer.sharded_parameters`` and ``optimizer.sharded_groups``, which it reads.
"""
