"""Models: plain torch modules of ``forward(numeric[B, X], embeddings) -> logits[B, T]``.

Names are loaded on first use: what a model needs of a feature is read by processes that have no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from girih.models.atbrg import ATBRG
    from girih.models.can import CAN
    from girih.models.dcn import DCN
    from girih.models.dcnv2 import DCNv2
    from girih.models.deepfm import DeepFM
    from girih.models.dien import DIEN
    from girih.models.din import DIN
    from girih.models.dlrm import DLRM
    from girih.models.dnn import DNN
    from girih.models.dsin import DSIN
    from girih.models.embeddings import Block, Embeddings, Jagged
    from girih.models.esmm import ESMM
    from girih.models.fm import FM
    from girih.models.loss import bce_with_logits
    from girih.models.lr import LR
    from girih.models.mmoe import MMoE
    from girih.models.needs import needs_of
    from girih.models.retrieval import Retrieval
    from girih.models.star import STAR
    from girih.models.two_tower import TwoTower
    from girih.models.wide_deep import WideDeep
    from girih.models.xdeepfm import XDeepFM
    from girih.models.zoo import BY_NAME, create

__all__ = [
    "ATBRG",
    "BY_NAME",
    "CAN",
    "DCN",
    "DIEN",
    "DIN",
    "DLRM",
    "DNN",
    "DSIN",
    "ESMM",
    "FM",
    "LR",
    "STAR",
    "Block",
    "DCNv2",
    "DeepFM",
    "Embeddings",
    "Jagged",
    "MMoE",
    "Retrieval",
    "TwoTower",
    "WideDeep",
    "XDeepFM",
    "bce_with_logits",
    "create",
    "needs_of",
]

_HOMES = {
    "embeddings": ("Block", "Embeddings", "Jagged"),
    "loss": ("bce_with_logits",),
    "needs": ("needs_of",),
    "two_tower": ("TwoTower",),
    "wide_deep": ("WideDeep",),
    "zoo": ("BY_NAME", "create"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"girih.models.{_HOME_OF.get(name, name.lower())}"), name)
    raise AttributeError(f"module 'girih.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
