"""Logistic regression, and the factorization machine (Rendle, ICDM 2010)."""

from __future__ import annotations

from torch import Tensor

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.model import Model
from girih.models.operators import FirstOrder, SecondOrder
from girih.schema import Schema


class LR(Model):
    """logit = b + Σ_f w_f + Σ_x w_x · numeric_x. Reads only first-order weights; one label.

    Args:
        schema: the features and labels of the data.

    Raises:
        ConfigError: several labels.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.LR(schema)
        >>> model.needs
        {'user': frozenset({'first_order'})}
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, needs.FIRST_ORDER)
        checks.one_label("lr", schema)
        self.first_order = FirstOrder(schema, bias=True)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, 1]."""
        return self.first_order(numeric, embeddings)


class FM(Model):
    """logit = b + Σ_i w_i + Σ_{i<j} <v_i, v_j> (eq. 1). All features have one dim; one label.

    Args:
        schema: the features and labels of the data.

    Raises:
        ConfigError: several labels, or features of different dims.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.FM(schema)
        >>> sorted(model.needs["user"])
        ['embedding', 'first_order']
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, needs.FIRST_ORDER, needs.EMBEDDING)
        checks.one_label("fm", schema)
        self.first_order = FirstOrder(schema, bias=True)
        self.second_order = SecondOrder(schema, checks.one_dim("fm", schema))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, 1]."""
        return self.first_order(numeric, embeddings) + self.second_order(numeric, embeddings)
