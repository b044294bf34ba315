"""Ids, rows, activations and gradients in fewer bytes on their way between processes.

``index_codec`` and ``value_codec`` are of embedding workers and rows (Persia §4.2.3); the rest, behind one interface, of
activations and their gradients in hierarchical training (HT §4.2).
"""

from collections.abc import Mapping
from types import MappingProxyType

from girih.comm.codecs.tensors import BFloat16, Codec, ErrorFeedback, Float32, Int8, TopK

__all__ = ["ACTIVATIONS", "GRADIENTS", "BFloat16", "Codec", "ErrorFeedback", "Float32", "Int8", "TopK"]

ACTIVATIONS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}
)
"""Name in a config → codec of what goes forward."""
GRADIENTS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), TopK())}
)
"""Name in a config → codec of what goes backward."""
