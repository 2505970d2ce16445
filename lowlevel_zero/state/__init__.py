"""The optimizer's state for its callers: whole tensors, as plain torch has them, and the parts of sharded states.

=============  ========================================================================================================
whole, values  whole tensors on the host, one at a time, or many of them in few messages
loading        states into slices, on all ranks or on none
boxes          sharded tensors: a rank's slice as rectangles of the parameter's shape
global_names   names of parameters that are the same on all ranks, experts' ones too
=============  ========================================================================================================

It takes the wrapped optimizer, records and sharded groups. ``checkpoint`` makes sharded states of these parts.
"""
