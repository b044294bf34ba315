"""Parts of every process of a run: its pipe to the launcher, names of shared memory, the lease of its run directory."""
