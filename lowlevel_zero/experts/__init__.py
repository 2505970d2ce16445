"""Experts (``pg_to_param_list``): parameters that fewer ranks share than the rest of the model.

Hangs on ``ParameterStore.shard_groups``: ``assign`` says which shard group has which parameters, and the optimizer
loops over the groups. With one group there is nothing of it.
"""
