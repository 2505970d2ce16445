"""The tests; what they share is in ``support``."""
