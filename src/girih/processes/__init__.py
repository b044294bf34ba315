"""What every process of a run has: its pipe to the launcher, names of shared memory, the lease of its run directory."""
