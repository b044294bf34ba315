"""Hierarchical Training (HT): traces, splits and places the dense net on group servers. Averages the copies."""
