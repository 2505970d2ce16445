"""Process groups, backends and what the ranks agree on."""
