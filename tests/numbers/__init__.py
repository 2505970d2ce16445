"""Numbers, held against the oracle."""
