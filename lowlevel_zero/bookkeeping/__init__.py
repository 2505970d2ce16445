"""What is kept about parameters, buckets, gradients and gathers: records and the stores that hold them."""
