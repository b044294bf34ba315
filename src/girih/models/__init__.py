"""Models: plain torch modules of ``forward(numeric[B, X], embeddings) -> logits[B, T]``."""

from __future__ import annotations

from girih.models.dcn import DCN
from girih.models.dcnv2 import DCNv2
from girih.models.deepfm import DeepFM
from girih.models.din import DIN
from girih.models.dlrm import DLRM
from girih.models.dnn import DNN
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.fm import FM
from girih.models.loss import bce_with_logits
from girih.models.lr import LR
from girih.models.mmoe import MMoE
from girih.models.needs import needs_of
from girih.models.wide_deep import WideDeep
from girih.models.zoo import BY_NAME, create

__all__ = [
    "BY_NAME",
    "DCN",
    "DIN",
    "DLRM",
    "DNN",
    "FM",
    "LR",
    "Block",
    "DCNv2",
    "DeepFM",
    "Embeddings",
    "Jagged",
    "MMoE",
    "WideDeep",
    "bce_with_logits",
    "create",
    "needs_of",
]
