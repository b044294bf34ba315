"""xDeepFM (Lian et al., KDD 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from girih.errors import ConfigError
from girih.models import checks, needs
from girih.models.embeddings import Embeddings
from girih.models.layers.mlp import DeepOptions, Widths
from girih.models.model import Model
from girih.models.operators import FieldMLP, Fields, FirstOrder
from girih.schema import Schema


class CIN(nn.Module):
    """Compressed interaction network: sums over D of products of vectors, one order more with each layer.

    X^k_h = Σ_i Σ_j W^{k,h}_ij (X^{k−1}_i ∘ X^0_j) (eq. 6), and p^k_h = Σ_d X^k_{h,d} (eq. 7). There is no activation.

    Shapes: B examples, F fields, D dim, H maps of the layer before.

    Args:
        layers: the number of maps X^k_h of each layer.
        split_half: in each layer except the last, the first half of the maps goes to the next layer and the other half
            is summed up, as in the authors' code. Otherwise all maps do both.

    Attributes:
        width: of p⁺, all the p^k side by side.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, num_fields: int, layers: tuple[int, ...], *, split_half: bool = False) -> None:
        super().__init__()
        self.passed = [width // 2 if split_half else width for width in layers[:-1]]
        self.maps = nn.ModuleList(
            nn.Linear(before * num_fields, width, bias=False)
            for before, width in zip((num_fields, *self.passed), layers, strict=True)
        )
        self.split_half = split_half
        self.width = sum(layers) - (sum(self.passed) if split_half else 0)

    def forward(self, fields: Tensor) -> Tensor:
        """Maps [B, F, D] to p⁺, [B, width]."""
        x = x0 = fields.mT
        sums = []
        for layer, passed in zip(self.maps, (*self.passed, 0), strict=True):
            products = (x[..., None] * x0[..., None, :]).flatten(2)  # [B, D, H · F]
            maps = layer(products)
            x = maps[..., :passed]
            sums.append((maps[..., passed:] if self.split_half else maps).sum(1))
        return torch.cat(sums, dim=1)


class XDeepFM(Model):
    """logits = Σ w + W p⁺ + MLP([embeddings, numeric]), p⁺ = CIN(fields) (eq. 6 to 9). All features have one dim.

    A field is a feature's embedding, or a numeric value times its learned vector. Several labels share the linear part.
    The bias belongs to the MLP's last layer.

    Args:
        schema: the features and labels of the data.
        cin_layers: the number of maps of each CIN layer.
        split_half: half of a layer's maps go to the next layer, and the other half to the output; otherwise all do both.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: an option out of range, odd ``cin_layers`` with ``split_half``, or features of different dims.

    Examples:
        >>> import girih
        >>> user, age = girih.Categorical(name="user", dim=8), girih.Numeric(name="age")
        >>> schema = girih.Schema([user, age], labels="clicked")
        >>> model = girih.models.XDeepFM(schema, cin_layers=[16, 16], hidden=[64, 32])
        >>> sum(parameter.numel() for parameter in model.parameters())
        3370
    """

    def __init__(
        self,
        schema: Schema,
        *,
        cin_layers: Widths = (128, 128),
        split_half: bool = False,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema, needs.FIRST_ORDER, needs.EMBEDDING)
        if split_half and any(width % 2 for width in cin_layers[:-1]):
            raise ConfigError(
                f"cin_layers = {list(cin_layers)}: split_half needs even widths before the last; make them even"
            )
        dim = checks.one_dim("xdeepfm", schema)
        self.first_order = FirstOrder(schema, bias=False)
        self.fields = Fields(schema, dim, with_numeric=True)
        self.cin = CIN(len(schema.features), cin_layers, split_half=split_half)
        self.cin_output = nn.Linear(self.cin.width, self.num_labels, bias=False)
        self.deep = FieldMLP(schema, outputs=self.num_labels, **deep)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        crossed: Tensor = self.cin_output(self.cin(self.fields(numeric, embeddings)))
        return self.first_order(numeric, embeddings) + crossed + self.deep(numeric, embeddings)
