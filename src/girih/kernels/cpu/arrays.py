"""The types of arrays in kernels, named by the kind and bits of an item.

Kernels that Python calls are compiled for the types in their annotations. Arrays are C-contiguous. They have one
dimension, or the number of dimensions in the name (``x2``). Arrays that are only read, and that may come from Arrow or
from another process, are sealed. A sealed array has the same type for writable and read-only memory. In functions that
only kernels call, these names do not determine the dimensions and seals.
"""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

SEALED = "read-only"

Bools = NDArray[np.bool_]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

I32x2 = Annotated[I32, 2]
I64x2 = Annotated[I64, 2]
U8x2 = Annotated[U8, 2]
U16x2 = Annotated[U16, 2]
U64x2 = Annotated[U64, 2]
F32x2 = Annotated[F32, 2]
F64x2 = Annotated[F64, 2]
F64x3 = Annotated[F64, 3]

SealedI32 = Annotated[I32, SEALED]
SealedI64 = Annotated[I64, SEALED]
SealedI64x2 = Annotated[I64, 2, SEALED]
SealedU8 = Annotated[U8, SEALED]
SealedU8x2 = Annotated[U8, 2, SEALED]
SealedU16 = Annotated[U16, SEALED]
SealedU32 = Annotated[U32, SEALED]
SealedF32 = Annotated[F32, SEALED]
SealedF32x2 = Annotated[F32, 2, SEALED]


def sealed(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a read-only view, for kernels that take sealed arrays."""
    view = array.view()
    view.flags.writeable = False
    return view
