"""Ids, rows, activations and gradients in fewer bytes on their way between processes.

``index_codec`` and ``value_codec`` are of embedding workers and rows (Persia §4.2.3); the rest, behind one interface, of
activations and their gradients in hierarchical training (HT §4.2).
"""
