"""Files that pin what must not change: checkpoints of earlier formats, and curves of short runs."""
