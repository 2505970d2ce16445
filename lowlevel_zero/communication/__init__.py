"""How ranks talk to each other: process groups, the shard group, backends, and who has failed."""
