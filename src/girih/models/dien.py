"""Deep Interest Evolution Network (Zhou et al., AAAI 2019)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import NonNegative
from girih.models import checks
from girih.models.embeddings import Embeddings, Jagged
from girih.models.layers.attention import BilinearAttention
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP, DeepOptions
from girih.models.layers.recurrent import GRU, Steps
from girih.models.loss import Targets, label_losses, weighted_mean
from girih.models.model import Model
from girih.schema import Schema


class DIEN(Model):
    """logits = MLP([embeddings, numeric, h'_T for each history]), loss = L_target + α · L_aux.

    Interest extractor: h_t = GRU(behaviour_t). Interest evolution: a_t = softmax_t(h_tᵀ W target), h'_t = AUGRU(h_t,
    a_t). The auxiliary loss trains h_t to distinguish behaviour t + 1 from a negative (:func:`auxiliary_losses`).

    The forward pass of a training step stores the auxiliary loss in this module. :meth:`loss` takes it.

    Args:
        schema: the features and labels of the data.
        attention: history → its target, as for :class:`girih.models.DIN`.
        auxiliary: α, at least 0; 0 trains without the auxiliary loss.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: a history without a target, or of another dim than its target.

    Examples:
        >>> import girih
        >>> item = girih.Categorical(name="item", dim=8)
        >>> history = girih.Sequence(name="history", table="item", dim=8)
        >>> schema = girih.Schema([item, history], labels="clicked")
        >>> model = girih.models.DIEN(schema, auxiliary=0.5, hidden=[64, 32])
        >>> model.pairs
        (('history', 'item'),)
    """

    not_substitutable = checks.NOT_SUBSTITUTABLE

    def __init__(
        self,
        schema: Schema,
        *,
        attention: dict[str, str] | None = None,
        auxiliary: NonNegative = 1.0,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema)
        self.auxiliary = auxiliary
        self.pairs = checks.pairs_of("dien", schema, attention)
        dims = checks.dims_of("dien", schema, self.pairs)
        self.units = nn.ModuleList(InterestEvolution(dim) for dim in dims.values())
        self.inputs = DenseInput(schema, self.read_whole(dims), for_products=True)
        width = self.inputs.width + sum(dims.values())
        self.deep = MLP(width, outputs=self.num_labels, **deep)
        self._left_for_loss: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Returns the state without a left auxiliary loss, which cannot be copied.

        A forward pass leaves this loss if no :meth:`loss` follows.
        """
        return self.__dict__ | {"_left_for_loss": None}

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        evolved, auxiliary = [], numeric.new_zeros(len(numeric))
        for unit, (history, target) in zip(self.units, self.pairs, strict=True):
            behaviours = embeddings.sequences[history]
            interests, final = unit(behaviours, embeddings[target])
            evolved.append(final)
            if self.training and self.auxiliary > 0:
                auxiliary = auxiliary + auxiliary_losses(interests, behaviours)
        self._left_for_loss = auxiliary if auxiliary.requires_grad else None
        return self.deep(self.inputs(numeric, embeddings, *evolved))

    def loss(self, outputs: Tensor, batch: Targets) -> Tensor:
        """Returns L_target + α · L_aux, weighted means over the examples, float32[].

        Args:
            outputs: logits, float32[B, T].
            batch: labels and weights of the examples.
        """
        loss = label_losses(outputs, batch)
        auxiliary, self._left_for_loss = self._left_for_loss, None
        if auxiliary is None:
            return loss
        return loss + self.auxiliary * weighted_mean(auxiliary, batch.example_weights)


class InterestEvolution(nn.Module):
    """Extracts the interests of a history, and evolves them with attention to the target.

    Shapes: L behaviours of all examples together, D dim. Behaviours, target and interests have the same dim, because
    the auxiliary loss multiplies interests with behaviours.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.extractor = GRU(dim, dim)
        self.attention = BilinearAttention(dim, dim)
        self.evolution = GRU(dim, dim)

    def forward(self, behaviours: Jagged, target: Tensor) -> tuple[Tensor, Tensor]:
        """Maps a history and float32[B, D] to interests float32[L, D] and the last state float32[B, D], 0 if empty."""
        steps = Steps.of(behaviours)
        interests = behaviours._replace(values=self.extractor(behaviours.values, steps))
        attention = self.attention(target, interests)
        evolved = behaviours._replace(values=self.evolution(interests.values, steps, attention))
        return interests.values, evolved.last()


def auxiliary_losses(interests: Tensor, behaviours: Jagged) -> Tensor:
    """Returns the auxiliary loss of each example: how badly its interests predict the next behaviours, float32[B].

    It is the mean over t of −log σ(h_tᵀ e_{t+1}) − log(1 − σ(h_tᵀ ê_{t+1})). The paper samples the negative ê from all
    items. This function takes the behaviour at place t + 1 of the next example in the batch that is long enough. The
    first example follows the last. If no other example has this place, the place is left out.

    Args:
        interests: float32[L, D].
    """
    (following,) = behaviours.positions().nonzero(as_tuple=True)
    negatives = _at_the_same_place(behaviours).index_select(0, following)
    has_negative = negatives != following
    following, negatives = following[has_negative], negatives[has_negative]
    values, before = behaviours.values, interests.index_select(0, following - 1)
    clicked = (before * values.index_select(0, following)).sum(dim=1)
    not_clicked = (before * values.index_select(0, negatives)).sum(dim=1)
    losses = F.softplus(-clicked) + F.softplus(not_clicked)
    example = behaviours.examples().index_select(0, following)
    num_examples = behaviours.offsets.numel() - 1
    counts = example.bincount(minlength=num_examples).clamp(min=1)
    return losses.new_zeros(num_examples).index_add(0, example, losses) / counts


def _at_the_same_place(sequences: Jagged) -> Tensor:
    """Returns, for each vector, the vector at its place in the next sequence that has this place, int64[L].

    A vector refers to itself if no other sequence has its place.
    """
    positions = sequences.positions()
    order = positions.argsort(stable=True)  # by place, then by example
    places = positions.index_select(0, order)
    sizes = positions.bincount()
    ends = sizes.cumsum(0)
    following = order.roll(-1)
    first = order.index_select(0, (ends - sizes).index_select(0, places))
    is_last = ends.index_select(0, places) - 1 == torch.arange(len(order), device=order.device)
    return positions.index_copy(0, order, first.where(is_last, following))
