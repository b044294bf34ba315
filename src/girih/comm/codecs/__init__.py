"""Codecs that shrink ids, rows, activations and gradients for their way between processes.

``index_codec`` and ``value_codec`` encode what embedding workers send: ids and rows (Persia §4.2.3). The other codecs
share one interface. They encode activations and their gradients in hierarchical training (HT §4.2).
"""
