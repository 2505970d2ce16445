"""Trainers: adapters for accelerate, transformers' ``Trainer`` and Lightning, on public methods alone.

The rest of the package doesn't import them. Import an adapter by its own name; it imports the library that it adapts.
"""
