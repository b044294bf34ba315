"""Packing of a step's work, and its order in time: ``[schedule]`` of a config (PICASSO §III)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from girih.config.bounds import Count
from girih.config.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions(Options):
    """Packing, interleaving and prefetching; each changes when work is done, and not what is learnt.

    Attributes:
        packing: tables of equal row layout share one operation (D-packing, PICASSO §III-B); False has one for each table.
        micro_batches: parts into which each batch is cut (D-interleaving, PICASSO §III-C); "auto" by Eq. 2.
        micro_batches_from: the layer from which on they are cut: "embedding", or "mlp", which bounds the memory of
            activations alone.
        interleaving_groups: sets of embedding groups that follow each other (K-interleaving, PICASSO §III-C); "auto" by
            Eq. 3.
        excluded: features whose embedding groups run ahead of the interleaving groups.
        prefetch: what depends on ids alone is done for the next batch beside this one's compute.
    """

    packing: bool = True
    micro_batches: Count | Literal["auto"] = 1
    micro_batches_from: Literal["embedding", "mlp"] = "embedding"
    interleaving_groups: Count | Literal["auto"] = 1
    excluded: tuple[str, ...] = ()
    prefetch: bool = True

    def _owner(self) -> str:
        return "schedule: "
