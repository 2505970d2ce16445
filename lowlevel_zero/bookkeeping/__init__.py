"""Records of parameters, and the stores of buckets, gradients and gathers."""
