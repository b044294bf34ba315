"""Codecs that compress ids, rows, activations and gradients between processes.

``rows`` packs ids and rows (Persia §4.2.3). ``tensors`` packs activations and their gradients in hierarchical training
(HT §4.2), by codecs with one interface.
"""
