"""Hierarchical Training (HT): the dense net traced, split and placed on group servers; copies averaged in the background."""
