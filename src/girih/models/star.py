"""Star Topology Adaptive Recommender (Sheng et al., CIKM 2021).

Shapes: B examples, K columns of the flat input, P domains. Values by domain are P tensors, each with the examples of
one domain, perhaps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import Count, Fraction
from girih.errors import ConfigError, DataError, nearest
from girih.models.embeddings import Embeddings
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import HIDDEN, MLP, AnyWidths, Widths, lacks_variance
from girih.models.model import Model
from girih.schema import Schema

Parts = Sequence[Tensor]
"""For each domain float32[·, ·], one row per example of the domain."""


class Domains(nn.Module):
    """Splits a batch by the domain of each example.

    This is a separate module because it depends on the data. So the rest of the model can be traced.
    """

    __call__: Callable[..., tuple[Tensor, Tensor, Parts]]

    def __init__(self, name: str, column: int, num_domains: int) -> None:
        super().__init__()
        self.name, self.column, self.num_domains = name, column, num_domains

    def forward(self, numeric: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Parts]:
        """Maps float32[B, X] and x[B, K] to each example's domain, the order of examples by domain, and the parts of x.

        Domain and order are int64[B].

        Raises:
            DataError: an example's domain is not an integer from 0 to ``num_domains`` − 1.
        """
        values = numeric[:, self.column]
        domain = values.long()
        wrong = (domain != values) | (domain < 0) | (domain >= self.num_domains)
        if wrong.any():
            raise DataError(
                f"star: domain {self.name!r} is {values[wrong][0].item():g} in an example; expected an integer from 0 to"
                f" {self.num_domains - 1}: number the domains so, or set num_domains"
            )
        order = domain.argsort(stable=True)
        sizes = domain.bincount(minlength=self.num_domains).tolist()
        return domain, order, x.index_select(0, order).split(sizes)  # type: ignore[no-untyped-call]


class PartitionedNorm(nn.Module):
    """z' = (γ γ_p) (z − μ_p) / √(σ²_p + ε) + (β + β_p) ("Partitioned Normalization"): batch norm by domain.

    If a training batch has at most one example of a domain, the running statistics are used, as in ``BatchNorm``.
    """

    __call__: Callable[..., Parts]
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, num_domains: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.domain_scale = nn.Parameter(torch.ones(num_domains, width))
        self.domain_shift = nn.Parameter(torch.zeros(num_domains, width))
        self.register_buffer("running_mean", torch.zeros(num_domains, width))
        self.register_buffer("running_var", torch.ones(num_domains, width))

    def forward(self, parts: Parts) -> Parts:
        """Normalizes each domain's examples. The shapes stay the same."""
        scales = (self.scale * self.domain_scale).unbind()
        shifts = (self.shift + self.domain_shift).unbind()
        # separate tensors: the gradient of one domain needs its statistics, so another domain must not overwrite them
        means, variances = ([row.clone() for row in each] for each in (self.running_mean, self.running_var))
        # all domains, also without examples here: trainers may add up their statistics
        found = [
            F.batch_norm(*each, training=self.training and not lacks_variance(each[0]))
            for each in zip(parts, means, variances, scales, shifts, strict=True)
        ]
        if self.training:
            self.running_mean.copy_(torch.stack(means))
            self.running_var.copy_(torch.stack(variances))
        return found


class StarLinear(nn.Module):
    """W*_p = W ⊙ W_p and b*_p = b + b_p ("Star Topology FCN"): a linear layer per domain, combined with a shared layer.

    W_p starts at 1 and b_p at 0, so all domains start equal.
    """

    __call__: Callable[..., Parts]

    def __init__(self, inputs: int, outputs: int, num_domains: int) -> None:
        super().__init__()
        self.shared = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(torch.ones(num_domains, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(num_domains, outputs))

    def forward(self, parts: Parts) -> Parts:
        """Maps [·, inputs] to [·, outputs] for each domain."""
        # all domains at once, so that a domain without examples has a gradient, of zeros, on every trainer
        weights = (self.shared.weight * self.weight).unbind()
        biases = (self.shared.bias + self.bias).unbind()
        return [F.linear(x, weight, bias) for x, weight, bias in zip(parts, weights, biases, strict=True)]


class STAR(Model):
    """logits = FCN_p(PN_p(x)) + MLP([indicator_p, x]) for an example of domain p, x = [embeddings, numeric].

    The second term is the auxiliary network, which learns the differences between whole domains ("Auxiliary Network").
    In the paper, each batch comes from one domain. This model splits a batch of several domains.

    Args:
        schema: the features and labels of the data.
        domain: a numeric feature that holds the domain's number, from 0 on. The model uses it for nothing else.
        num_domains: number of domains.
        partitioned_norm: normalise x by domain; it is the only normalisation.
        auxiliary_hidden: widths of the auxiliary network's layers.
        indicator_dim: width of its vector for the domain.
        hidden: widths of the FCN's layers.
        dropout: a probability in [0, 1), for the FCN and the auxiliary network.

    Raises:
        ConfigError: ``domain`` is not a numeric feature, or it has a transform.

    Examples:
        >>> import girih
        >>> user = girih.Categorical(name="user", dim=8)
        >>> country = girih.Numeric(name="country")
        >>> schema = girih.Schema([user, country], labels="clicked")
        >>> model = girih.models.STAR(
        ...     schema, domain="country", num_domains=3, hidden=[64, 32]
        ... )
        >>> model.domains.num_domains
        3
    """

    not_substitutable = "each domain normalises and multiplies the whole input with its own weights; use strategy 'synchronous'"

    def __init__(
        self,
        schema: Schema,
        *,
        domain: str,
        num_domains: Count,
        partitioned_norm: bool = True,
        auxiliary_hidden: AnyWidths = (64,),
        indicator_dim: Count = 16,
        hidden: Widths = HIDDEN,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__(schema)
        self.dropout = dropout
        self.domains = Domains(domain, _column_of(schema, domain), num_domains)
        self.inputs = DenseInput(schema, numeric=[f.name for f in schema.numeric if f.name != domain])
        width = self.inputs.width
        self.norm = PartitionedNorm(width, num_domains) if partitioned_norm else None
        widths = (width, *hidden, self.num_labels)
        self.star = nn.ModuleList(
            StarLinear(inputs, outputs, num_domains) for inputs, outputs in pairwise(widths)
        )
        self.indicator = nn.Embedding(num_domains, indicator_dim)
        nn.init.normal_(self.indicator.weight, std=0.01)  # the same as rows of tables
        self.auxiliary = MLP(width + indicator_dim, auxiliary_hidden, self.num_labels, dropout=dropout)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T].

        Raises:
            DataError: an example's domain is not an integer from 0 to ``num_domains`` − 1.
        """
        x = self.inputs(numeric, embeddings)
        domain, order, parts = self.domains(numeric, x)
        if self.norm is not None:
            parts = self.norm(parts)
        *layers, last = self.star
        for layer in layers:
            parts = [F.dropout(part.relu(), self.dropout, self.training) for part in layer(parts)]
        main = torch.cat(last(parts)).index_select(0, order.argsort())
        return main + self.auxiliary(torch.cat([self.indicator(domain), x], dim=1))


def _column_of(schema: Schema, domain: str) -> int:
    """Returns the domain's place among the numeric features."""
    names = [feature.name for feature in schema.numeric]
    if domain not in names:
        sparse = next((feature for feature in schema.sparse if feature.name == domain), None)
        reason = (
            f"; models see no ids: add one of kind numeric with column = {sparse.source!r}, and name that"
            if sparse
            else nearest(str(domain), names)
        )
        raise ConfigError(f"domain = {domain!r}: not a numeric feature{reason}")
    transform = schema.numeric[names.index(domain)].transform
    if transform:
        raise ConfigError(
            f"domain = {domain!r}: its transform {list(transform)} changes its numbers; drop it"
        )
    return names.index(domain)
