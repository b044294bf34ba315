"""Histories cut into sessions.

Shapes: B examples, S sessions of all of them together, M ids of the longest session, D dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.models.embeddings import Jagged


class Sessions(NamedTuple):
    """The sessions of all histories, in the order of examples, each history's oldest first.

    Attributes:
        values: float32[S, M, D], zeros past each end. mask: bool[S, M], what of them is real.
        ages: int64[S], how many sessions of the same history are newer. offsets: int64[B+1], where each history's begin.
    """

    values: Tensor
    mask: Tensor
    ages: Tensor
    offsets: Tensor


def cut(history: Jagged, length: int, most: int) -> Sessions:
    """Cuts each history into sessions of ``length`` ids, and keeps the newest ``most``; the oldest may be shorter.

    It cuts from the end, so that the newest session is as long as it can be, and ids older than
    ``length * most`` are left out.
    """
    begins, ends = history.offsets[:-1], history.offsets[1:]
    counts = ((ends - begins + length - 1) // length).clamp(max=most)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    sessions = torch.arange(len(numbers), device=counts.device)
    ages = offsets[1:].index_select(0, numbers) - 1 - sessions
    last = ends.index_select(0, numbers) - ages * length
    first = torch.maximum(last - length, begins.index_select(0, numbers))
    width = int((last - first).max()) if len(sessions) else 1
    rows = first[:, None] + torch.arange(width, device=first.device)
    mask = rows < last[:, None]
    padded = history.values.index_select(0, torch.where(mask, rows, first[:, None]).flatten())
    values = padded.view(len(sessions), width, history.values.shape[1]) * mask[:, :, None]
    return Sessions(values, mask, ages, offsets)
