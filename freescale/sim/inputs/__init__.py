"""What a simulation is given: a profile, a cluster, a workload."""
