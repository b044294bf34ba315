"""Rows in GPU memory, with the semantics of those in DRAM; needs torch and triton."""
