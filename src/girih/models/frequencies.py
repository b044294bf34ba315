"""The frequencies of items in batches, estimated as they stream by (Yi et al., RecSys 2019, Algorithms 2 and 3).

Shapes: U unique items of a step, H slots, K = 2 hash functions.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

_FACTORS: Final = (-7046029254386353131, -4417276706812531889)
"""Odd numbers that ids are multiplied by, as 64-bit words; the high bits are the slot."""
SLOT_BITS: Final = 16


class StreamingFrequencies(nn.Module):
    """log q of items, q being how many times an item is expected in a step's batch.

    A slot keeps the step at which its item was seen last, and the mean number of steps between two sightings: an item that is
    there c times after Δ steps was seen c times, every Δ / c steps. The mean is plain until 1/rate sightings, then exponential, so
    that it follows what becomes popular. Items that share a slot are seen too often; of two slots the rarer one counts. It is
    state of the model: checkpoints have it, and a step that is refused puts it back.

    Args:
        rate: weight of the newest sighting (α in the paper), in (0, 1].
    """

    steps: Tensor
    last: Tensor
    interval: Tensor
    sightings: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        shape = (len(_FACTORS), 1 << SLOT_BITS)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("interval", torch.zeros(shape))
        self.register_buffer("sightings", torch.zeros(shape, dtype=torch.int32))

    def seen(self, ids: Tensor) -> Tensor:
        """Counts the items of a step, int64[N]; returns the logarithm of each one's q, float32[N]: no gradient passes here."""
        self.steps += 1
        unique, inverse = torch.unique(ids, return_inverse=True)
        found = ids.new_zeros(len(unique), dtype=torch.float32)
        for row, factor in enumerate(_FACTORS):
            slots = (unique * factor) >> (64 - SLOT_BITS) & ((1 << SLOT_BITS) - 1)
            own, of_item = torch.unique(slots[inverse], return_inverse=True)
            counts = torch.bincount(of_item, minlength=len(own))
            newest = (self.steps - self.last[row, own]).float() / counts
            times = self.sightings[row, own] + counts.int()
            weight = torch.maximum(counts / times, 1 - (1 - self.rate) ** counts)
            self.interval[row, own] = torch.lerp(self.interval[row, own], newest, weight)
            self.sightings[row, own] = times
            self.last[row, own] = self.steps.int()
            found = torch.maximum(found, self.interval[row, slots])
        return -found.log()[inverse]
