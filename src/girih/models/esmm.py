"""Entire Space Multi-task Model (Ma et al., SIGIR 2018): what follows a click, learned from all impressions."""

from __future__ import annotations

import torch
from torch import Tensor

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.model import Model
from girih.models.operators import FieldMLP
from girih.schema import Schema


class ESMM(Model):
    """pCTCVR = pCTR · pCVR (eq. 1), with two networks on shared embeddings: pCTR = σ(a), pCVR = σ(b).

    The first label is the click, the second what follows it, which is 1 only where the first is: both losses are over all
    impressions (eq. 3), so pCVR is learned without the bias of a sample of clicks. The second output is the logit of
    pCTCVR; pCVR is the quotient of the two predictions.

    Args:
        hidden: the layers of each network before its last.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: tuple[int, ...] = (400, 400, 400),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(schema, needs.EMBEDDING)
        hidden = checks.widths("hidden", hidden)
        checks.two_probabilities("esmm", schema)
        self.click, self.after = (
            FieldMLP(schema, hidden, 1, dropout=dropout, batch_norm=batch_norm) for _ in range(2)
        )

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits of pCTR and pCTCVR, float32[B, 2]."""
        a, b = self.click(numeric, embeddings), self.after(numeric, embeddings)
        return torch.cat([a, logit_of_product(a, b)], dim=1)


def logit_of_product(a: Tensor, b: Tensor) -> Tensor:
    """The logit of σ(a)·σ(b), as 1/σ(a)σ(b) − 1 = e⁻ᵃ + e⁻ᵇ + e⁻ᵃ⁻ᵇ; finite for all finite a and b, of one shape."""
    return -torch.logsumexp(torch.stack([-a, -b, -a - b]), dim=0)
