"""Averaging of replicas in the background: one file per algorithm, and the thread that carries it out beside training."""
