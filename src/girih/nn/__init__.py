"""Drop-in modules for any PyTorch model and loop."""

from __future__ import annotations

from girih.nn.collection import EmbeddingBagCollection
from girih.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection"]
