"""Routing on a GPU: unique keys in the order of the places that own them.

Shapes: U unique keys, with room for n; P places, T tables.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from girih.kernels.gpu.dedup import Unique
from girih.kernels.gpu.hashing import key_hash, scaled
from girih.kernels.gpu.jit import block_of, kernel, launch


@kernel
def _find_sections(
    keys: tl.tensor, tables: tl.tensor, num_keys: tl.tensor, sections: tl.tensor, n: tl.tensor, num_places: tl.tensor,
    num_tables: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = i < tl.load(num_keys)
    key_id = tl.load(keys + i, mask=known, other=0)
    table = tl.load(tables + i, mask=known, other=0)
    # as shards_of_keys of kernels/cpu/hashing.py has it: checkpoints rest on it
    place = scaled(key_hash(key_id, table), tl.zeros_like(table) + num_places).to(tl.int32)
    behind = tl.zeros_like(table) + num_places * num_tables
    tl.store(sections + i, tl.where(known, place * num_tables + table, behind), mask=i < n)


def route(found: Unique, num_places: int, num_tables: int) -> tuple[Tensor, Tensor]:
    """Keys in the order of their owners, those of one table side by side, else as they were; waits for nothing.

    Args:
        num_places: processes, of one shard each.

    Returns:
        int64[n], the number of each key in that order; int64[P · T], how many keys there are up to those of each place and
        table, these included.
    """
    n, there = len(found.keys), found.keys.device
    sections = torch.empty(n, dtype=torch.int32, device=there)
    launch(
        _find_sections, n, block_of(256, n), found.keys, found.tables, found.num_keys, sections, n, num_places, num_tables
    )  # fmt: skip
    ordered, order = torch.sort(sections, stable=True)
    each = torch.arange(num_places * num_tables, dtype=torch.int32, device=there)
    return order, torch.searchsorted(ordered, each, right=True)
