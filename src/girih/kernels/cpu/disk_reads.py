"""Blocks read from a file with direct I/O: one after the other by ``pread``, or many at once.

Shapes: m blocks to read.
"""

from __future__ import annotations

import errno

from girih.kernels.cpu.arrays import U8
from girih.kernels.cpu.disk import Blocks, Reads, take_records
from girih.kernels.cpu.jit import kernel
from girih.kernels.cpu.system import System, call, errno_of
from girih.kernels.cpu.vector import address_of

_SECTOR = 512  # what is left of a block after a short read begins at a whole sector
_EINTR, _EAGAIN, _EIO = errno.EINTR, errno.EAGAIN, errno.EIO


@kernel()
def read_in_turn(
    system: System, file: int, blocks: Blocks, reads: Reads, first: int, last: int, memory: U8
) -> int:
    """Reads blocks ``first`` to ``last`` of the list, one at a time, and takes the records that are wanted of each.

    Args:
        memory: uint8[block_bytes], aligned.

    Returns:
        0, or the number of the error; EIO too where the file ends.
    """
    block, size = address_of(memory), blocks.block_bytes
    for number in range(first, last):
        done = 0
        while done < size:
            got = call(system.pread, file, block + done, size - done, reads.offsets[number] + done, 0, 0, 0)
            if got < 0:
                error = errno_of(system)
                if error != _EINTR and error != _EAGAIN:
                    return error
            elif done + got == size:
                done = size
            elif got < _SECTOR:
                return _EIO
            else:
                done += got // _SECTOR * _SECTOR
        take_records(blocks, reads, number, block)
    return 0
