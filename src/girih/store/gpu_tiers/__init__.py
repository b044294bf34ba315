"""The hottest rows in GPU memory, the others with the host: HybridHash's uppermost tier; needs torch and triton."""
