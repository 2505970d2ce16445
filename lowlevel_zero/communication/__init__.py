"""Communication between ranks: process groups, shard groups, backends, agreements, and ranks that fail."""
