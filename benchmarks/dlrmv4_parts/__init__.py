"""What the benchmarks of DLRMv4 share."""
