"""The plain deep network on embeddings, and models that add a shallow part to it."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import Tensor

from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.mlp import DeepOptions
from girih.models.model import Model
from girih.models.operators import FieldMLP, FirstOrder, SecondOrder
from girih.schema import Schema


class DNN(Model):
    """logits = MLP([embeddings, numeric]).

    Models that add a shallow part build it in :meth:`build_shallow`.

    Args:
        schema: the features and labels of the data.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.DNN(schema, hidden=[64, 32], dropout=0.1)
        >>> sum(parameter.numel() for parameter in model.parameters())
        2753
    """

    kinds: ClassVar[tuple[str, ...]] = (needs.EMBEDDING,)

    def __init__(self, schema: Schema, **deep: Unpack[DeepOptions]) -> None:
        super().__init__(schema, *self.kinds)
        self.build_shallow(schema)
        self.deep = FieldMLP(schema, outputs=self.num_labels, **deep)

    def build_shallow(self, schema: Schema) -> None:
        """Does nothing here. It runs before the deep part is built, whose initial values are drawn afterwards."""

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        return self.deep(numeric, embeddings)


class WideDeep(DNN):
    """logits = wide + MLP([embeddings, numeric]), trained jointly: Wide & Deep (Cheng et al., DLRS 2016), eq. 3.

    The wide part is linear in ids and numeric features; crosses are features of the data. Several labels share the wide
    part. The bias belongs to the MLP's last layer.

    Args:
        schema: the features and labels of the data.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.WideDeep(schema, hidden=[64, 32])
        >>> sum(parameter.numel() for parameter in model.parameters())
        2754
    """

    kinds = (needs.FIRST_ORDER, needs.EMBEDDING)

    def build_shallow(self, schema: Schema) -> None:
        """Adds the wide part."""
        self.wide = FirstOrder(schema, bias=False)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        return self.wide(numeric, embeddings) + self.deep(numeric, embeddings)


class DeepFM(DNN):
    """logits = FM + MLP([embeddings, numeric]) on the same embeddings (Guo et al., IJCAI 2017, eq. 1).

    All features have one dim. Several labels share the FM part. The bias belongs to the MLP's last layer.

    Args:
        schema: the features and labels of the data.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range, or features of different dims.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.DeepFM(schema, hidden=[64, 32], batch_norm=True)
        >>> sum(parameter.numel() for parameter in model.parameters())
        2954
    """

    kinds = (needs.FIRST_ORDER, needs.EMBEDDING)

    def build_shallow(self, schema: Schema) -> None:
        """Adds the factorization machine."""
        self.first_order = FirstOrder(schema, bias=False)
        self.second_order = SecondOrder(schema, checks.one_dim("deepfm", schema))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        fm = self.first_order(numeric, embeddings) + self.second_order(numeric, embeddings)
        return fm + self.deep(numeric, embeddings)
