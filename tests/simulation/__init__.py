"""All ranks in one process, one at a time, under one seeded scheduler."""
