"""Reports, the command line, the examples, the benchmarks and the project's own rules."""
