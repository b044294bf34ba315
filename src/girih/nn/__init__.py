"""Drop-in modules for any PyTorch model and loop.

Examples:
    An ordinary PyTorch loop: ``backward`` trains the rows.

    >>> import girih
    >>> import torch
    >>> bag = girih.nn.EmbeddingBag(8, optimizer=girih.optim.Adagrad(lr=0.05))
    >>> linear = torch.nn.Linear(8, 1)
    >>> loss = linear(bag(torch.tensor([[7, 8], [9, 10**12]]))).sum()
    >>> loss.backward()
    >>> bag.num_rows
    4
"""

from __future__ import annotations

from girih.nn.collection import EmbeddingBagCollection
from girih.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection"]
