"""Deep Interest Network (Zhou et al., KDD 2018)."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from girih.models import checks
from girih.models.embeddings import Embeddings
from girih.models.layers.attention import Attention
from girih.models.layers.mlp import AnyWidths, DeepOptions
from girih.models.model import Model
from girih.models.operators import AttendedProjection, FieldMLP
from girih.schema import Schema


class DIN(Model):
    """logits = MLP([embeddings, numeric, Σ_j a(history_j, target) · history_j for each history]) (eq. 3).

    Args:
        schema: the features and labels of the data.
        attention: history (a sequence feature) → its target (a categorical feature of equal dim). By default each
            sequence is paired with the only categorical feature that shares its table. Sequences that a mapping leaves
            out are pooled like any other feature.
        attention_hidden: widths of the activation unit's layers, which have neither dropout nor batch norm.
        softmax: normalise the attention over the history; the paper does not normalise it.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: a history without a target, or of another dim than its target.

    Examples:
        >>> import girih
        >>> item = girih.Categorical(name="item", dim=8)
        >>> history = girih.Sequence(name="history", table="item", dim=8)
        >>> schema = girih.Schema([item, history], labels="clicked")
        >>> model = girih.models.DIN(schema, attention_hidden=[32], hidden=[64, 32])
        >>> model.pairs
        (('history', 'item'),)
    """

    def __init__(
        self,
        schema: Schema,
        *,
        attention: dict[str, str] | None = None,
        attention_hidden: AnyWidths = (80, 40),
        softmax: bool = False,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema)
        self.pairs = pairs = checks.pairs_of("din", schema, attention)
        dims = checks.dims_of("din", schema, pairs)
        pooled = self.read_whole(dims)
        units = nn.ModuleList(Attention(dim, attention_hidden, softmax=softmax) for dim in dims.values())
        self.deep = FieldMLP(
            schema,
            outputs=self.num_labels,
            features=pooled,
            first=lambda linear: AttendedProjection(schema, linear, pooled, pairs, units),
            more_inputs=sum(dims.values()),
            **deep,
        )

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        return self.deep(numeric, embeddings)
