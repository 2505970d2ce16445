"""Checkpoints in files: sharded, atomic, for any number of ranks, and readable by torch's own tools.

The seam: ``sharded_parameters`` (the records), ``shard_group``, ``options``, ``device``, ``finish_gathers``, ``runs``
and ``serial`` of the optimizer, and ``ShardedState``, its state by name.

======================  ===============================================================================================
contents                the tensors of a model and its optimizers' states by name, to save and to load into
optimizers              one optimizer or several, and their schedulers: checked, and called by names
saving, storage         saving: agreed on, written beside, put in place by the first rank when all have written
plan, tensor_bytes      where each rank's tensors lie in its file, by arithmetic; one tensor's bytes
checksum                checksums of files, while they are written and before they are read
loading                 loading: everything is checked first, then read into place
folders                 where checkpoints are, and what crashes leave
background              writes by a thread, whose failures are raised later
manifest, objects       the files that aren't tensors: sizes and checksums; settings and DCP's index as data, never run
saved                   all of these together, for one checkpoint
consolidate             a checkpoint as files that load without this package
sharded, sharded_state  an optimizer's state by name, also for one's own ``dcp.save`` and ``dcp.load``
======================  ===============================================================================================
"""

from ..bookkeeping.module_names import state_dict_for
from .folders import latest
from .loading import load_checkpoint, read_rank_state
from .manifest import Manifest, read_manifest
from .objects import read_metadata
from .saving import Saving, save_checkpoint
from .sharded import Sharded

__all__ = [
    "Manifest",
    "Saving",
    "Sharded",
    "latest",
    "load_checkpoint",
    "read_manifest",
    "read_metadata",
    "read_rank_state",
    "save_checkpoint",
    "state_dict_for",
]
