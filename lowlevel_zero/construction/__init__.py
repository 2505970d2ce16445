"""Construction of an optimizer: checks, agreement between ranks, and sharding of its parameters.

==========  ===========================================================================================================
prepare     checks on each rank, the agreement of the ranks, and then slices
checks      what an optimizer is made of, on this rank: each raises for what can't be sharded, and changes nothing
sharding    parameters over padded storages, and the wrapped optimizer over slices of them
start_line  the line about a new optimizer, and where it is shown
==========  ===========================================================================================================

It takes the wrapped optimizer, options and process groups, and leaves records and shard groups.
"""
