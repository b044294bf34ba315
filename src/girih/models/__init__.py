"""Models: plain torch modules of ``forward(numeric[B, X], embeddings) -> logits[B, T]``.

Names are loaded on first use, because processes without torch read the needs of models.

Examples:
    >>> import girih
    >>> features = [
    ...     girih.Categorical(name="user", dim=8),
    ...     girih.Categorical(name="item", dim=8),
    ... ]
    >>> schema = girih.Schema(features, labels="clicked")
    >>> model = girih.models.DeepFM(schema, hidden=[64, 32])
    >>> girih.models.BY_NAME["deepfm"] is type(model)
    True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from girih.models.atbrg import ATBRG
    from girih.models.can import CAN
    from girih.models.dcn import DCN, DCNv2
    from girih.models.dien import DIEN
    from girih.models.din import DIN
    from girih.models.dlrm import DLRM
    from girih.models.dnn import DNN, DeepFM, WideDeep
    from girih.models.dsin import DSIN
    from girih.models.embeddings import Block, Embeddings, Jagged
    from girih.models.fm import FM, LR
    from girih.models.loss import bce_with_logits
    from girih.models.multitask import ESMM, MMoE
    from girih.models.needs import needs_of
    from girih.models.retrieval import Retrieval
    from girih.models.star import STAR
    from girih.models.two_tower import TwoTower
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

CLASSES = {
    "lr": "fm.LR", "fm": "fm.FM", "wide_deep": "dnn.WideDeep", "deepfm": "dnn.DeepFM", "dnn": "dnn.DNN", "dlrm": "dlrm.DLRM",
    "dcn": "dcn.DCN", "dcnv2": "dcn.DCNv2", "xdeepfm": "xdeepfm.XDeepFM", "din": "din.DIN", "dien": "dien.DIEN",
    "dsin": "dsin.DSIN", "atbrg": "atbrg.ATBRG", "can": "can.CAN", "mmoe": "multitask.MMoE", "esmm": "multitask.ESMM", "star": "star.STAR",
    "two_tower": "two_tower.TwoTower", "retrieval": "retrieval.Retrieval",
}  # fmt: skip
"""A model's name in configs → its module in this package and its class. :data:`girih.models.zoo.BY_NAME` has the classes."""
_OTHERS = (
    "embeddings.Block", "embeddings.Embeddings", "embeddings.Jagged", "loss.bce_with_logits", "needs.needs_of", "zoo.BY_NAME", "zoo.create",
)  # fmt: skip
_HOME_OF = {name: home for home, name in (place.split(".") for place in (*CLASSES.values(), *_OTHERS))}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"girih.models.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'girih.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
