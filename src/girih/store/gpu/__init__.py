"""Rows in GPU memory, with the same semantics as in DRAM. Needs torch and triton."""
