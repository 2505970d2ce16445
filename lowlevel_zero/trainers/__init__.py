"""Trainers: adapters for accelerate, transformers' ``Trainer`` and Lightning, on public methods alone.

The core doesn't know this room. An adapter is imported by its own name, with the library that it adapts.
"""
