"""The saving of substitution over fetching weights, as the DES paper counts it (§4.1 to 4.3, Table 2).

Bytes that one of N workers moves in a step, forward pass only, ids of 8 bytes and weights of 4. Both sides have the
factor (N − 1) / N, so that the share saved does not depend on N.
"""

from __future__ import annotations

from girih.planner.traffic import FLOAT_BYTES, KEY_BYTES, ring_bytes


def mesh_bytes(num_keys: int, width: int, *, num_workers: int, projection_bytes: int = 0) -> float:
    """Q^Mesh: keys, and weights of ``width`` numbers a key, fetched from the other workers.

    Args:
        num_keys: unique features of the batch.
        projection_bytes: S_W, of the first fully connected layer, where it is fetched as well (§4.3).
    """
    fetched = num_keys * (KEY_BYTES + width * FLOAT_BYTES) + projection_bytes
    return (num_workers - 1) / num_workers * fetched


def substituted_bytes(batch_size: int, columns: int, *, num_workers: int) -> float:
    """Q^DES: partial results of ``columns`` numbers an example through a ring AllReduce."""
    return ring_bytes(batch_size * columns * FLOAT_BYTES, num_workers)


def saving(
    batch_size: int,
    num_keys: int,
    *,
    width: int,
    columns: int,
    projection_bytes: int = 0,
    num_workers: int = 4,
) -> float:
    """R: the share of the mesh's bytes that substitution saves."""
    mesh = mesh_bytes(num_keys, width, num_workers=num_workers, projection_bytes=projection_bytes)
    return 1 - substituted_bytes(batch_size, columns, num_workers=num_workers) / mesh
