"""Files that pin what must not change: the curves of short runs."""
