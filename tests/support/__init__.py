"""What tests and benchmarks share: starting ranks, the oracle for numbers, calls in any order, mistakes of callers."""
