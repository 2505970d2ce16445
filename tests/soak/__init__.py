"""Tests for a night."""
