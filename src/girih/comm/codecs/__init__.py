"""Ids, rows, activations and gradients in fewer bytes on their way between processes.

``index_codec`` and ``value_codec`` are of embedding workers and rows (Persia §4.2.3); the rest, behind one interface, of
activations and their gradients in hierarchical training (HT §4.2).
"""

from collections.abc import Mapping
from types import MappingProxyType

from girih.comm.codecs.codec import Codec
from girih.comm.codecs.floats import BFloat16, Float32
from girih.comm.codecs.int8 import Int8
from girih.comm.codecs.topk import ErrorFeedback, TopK

__all__ = ["ACTIVATIONS", "GRADIENTS", "BFloat16", "Codec", "ErrorFeedback", "Float32", "Int8", "TopK"]

ACTIVATIONS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), Int8())}
)
"""Name in a config → codec of what goes forward."""
GRADIENTS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Float32(), BFloat16(), TopK())}
)
"""Name in a config → codec of what goes backward."""
