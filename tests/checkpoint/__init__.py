"""Whole and sharded state, and files of it."""
