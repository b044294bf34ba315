"""Deep Session Interest Network (Feng et al., IJCAI 2019)."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.config.bounds import Count
from girih.errors import ConfigError
from girih.models import checks
from girih.models.embeddings import Embeddings, Jagged
from girih.models.layers.attention import BilinearAttention, SelfAttention, weighted_sum
from girih.models.layers.inputs import DenseInput
from girih.models.layers.mlp import MLP, DeepOptions
from girih.models.layers.recurrent import BiLSTM
from girih.models.model import Model
from girih.schema import Schema


class DSIN(Model):
    """logits = MLP([embeddings, numeric, U^I and U^H for each history]): interests of sessions, and their evolution.

    In the paper, a new session begins after 30 minutes without a click. A batch has ids without times, so this model
    cuts sessions by length (:func:`cut_sessions`).

    Args:
        schema: the features and labels of the data.
        attention: history → its target, as for :class:`girih.models.DIN`.
        session_length: number of ids of a session.
        max_sessions: number of sessions of a history; earlier ids are left out.
        heads: number of heads of the self-attention; it must divide the histories' dims.
        deep: ``hidden``, the widths of the hidden layers (default 400, 400, 400); ``dropout``, a probability in [0, 1)
            (default 0); ``batch_norm`` (default False).

    Raises:
        ConfigError: a history without a target, or of another dim than its target; ``heads`` that do not divide a dim.

    Examples:
        >>> import girih
        >>> item = girih.Categorical(name="item", dim=8)
        >>> history = girih.Sequence(name="history", table="item", dim=8)
        >>> schema = girih.Schema([item, history], labels="clicked")
        >>> model = girih.models.DSIN(schema, session_length=5, heads=2, hidden=[64, 32])
        >>> model.pairs
        (('history', 'item'),)
    """

    not_substitutable = checks.NOT_SUBSTITUTABLE

    def __init__(
        self,
        schema: Schema,
        *,
        attention: dict[str, str] | None = None,
        session_length: Count = 10,
        max_sessions: Count = 5,
        heads: Count = 1,
        **deep: Unpack[DeepOptions],
    ) -> None:
        super().__init__(schema)
        self.pairs = checks.pairs_of("dsin", schema, attention)
        dims = checks.dims_of("dsin", schema, self.pairs)
        for history, dim in dims.items():
            if dim % heads:
                raise ConfigError(f"heads = {heads}: expected a divisor of {dim}, the dim of {history!r}")
        self.units = nn.ModuleList(
            SessionInterests(dim, session_length, max_sessions, heads) for dim in dims.values()
        )
        self.inputs = DenseInput(schema, self.read_whole(dims), for_products=True)
        width = self.inputs.width + 3 * sum(dims.values())
        self.deep = MLP(width, outputs=self.num_labels, **deep)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Maps float32[B, X] and embeddings to logits float32[B, T]."""
        interests = [
            unit(embeddings.sequences[history], embeddings[target])
            for unit, (history, target) in zip(self.units, self.pairs, strict=True)
        ]
        return self.deep(self.inputs(numeric, embeddings, *interests))


class SessionInterests(nn.Module):
    """Interests of a history's sessions, weighted by its target: the four layers of the paper.

    - bias encoding: adds w^K_k + w^T_t + w^C to id t of session k, with k counted from the newest session
    - interest extractor: I_k, the mean over session k of its self-attention, with the same weights for all sessions
    - interest interaction: H_k = BiLSTM(I_k), both directions side by side
    - interest activation: U^I = Σ_k softmax_k(I_kᵀ W^I target) I_k, and U^H in the same way from H_k

    Shapes: S sessions of all examples together, M ids of the longest, D dim.
    """

    def __init__(self, dim: int, session_length: int, max_sessions: int, heads: int) -> None:
        super().__init__()
        self.length, self.most = session_length, max_sessions
        self.session_bias = nn.Parameter(torch.zeros(max_sessions))
        self.place_bias = nn.Parameter(torch.zeros(session_length))
        self.column_bias = nn.Parameter(torch.zeros(dim))
        self.extractor = SelfAttention(dim, heads)
        self.interaction = BiLSTM(dim, dim)
        self.of_interests = BilinearAttention(dim, dim)
        self.of_states = BilinearAttention(2 * dim, dim)

    def forward(self, history: Jagged, target: Tensor) -> Tensor:
        """Maps a history and float32[B, D] to [U^I, U^H], float32[B, 3 · D]. An empty history gives zeros."""
        values, mask, ages, offsets = cut_sessions(history, self.length, self.most)
        places = self.place_bias[: values.shape[1], None]
        biased = values + self.session_bias[ages][:, None, None] + places + self.column_bias
        extracted = self.extractor(biased, mask) * mask[:, :, None]
        interests = Jagged(extracted.sum(dim=1) / mask.sum(dim=1, keepdim=True), offsets)
        states = Jagged(self.interaction(interests), offsets)
        by_interests = weighted_sum(self.of_interests(target, interests), interests)
        by_states = weighted_sum(self.of_states(target, states), states)
        return torch.cat([by_interests, by_states], dim=1)


class Sessions(NamedTuple):
    """The sessions of all histories, in the order of examples. Each history starts with its oldest session.

    Attributes:
        values: float32[S, M, D], zeros after each end. mask: bool[S, M], marks real vectors.
        ages: int64[S], number of newer sessions of the same history. offsets: int64[B+1], the start of each history.
    """

    values: Tensor
    mask: Tensor
    ages: Tensor
    offsets: Tensor


def cut_sessions(history: Jagged, length: int, most: int) -> Sessions:
    """Cuts each history into sessions of ``length`` ids, and keeps the newest ``most``; the oldest may be shorter.

    The cuts start at the end, so the newest session is as long as possible. Ids older than ``length * most`` are left
    out.
    """
    begins, ends = history.offsets[:-1], history.offsets[1:]
    counts = ((ends - begins + length - 1) // length).clamp(max=most)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    numbers = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    sessions = torch.arange(len(numbers), device=counts.device)
    ages = offsets[1:].index_select(0, numbers) - 1 - sessions
    last = ends.index_select(0, numbers) - ages * length
    first = torch.maximum(last - length, begins.index_select(0, numbers))
    width = int((last - first).max()) if len(sessions) else 1
    rows = first[:, None] + torch.arange(width, device=first.device)
    mask = rows < last[:, None]
    padded = history.values.index_select(0, torch.where(mask, rows, first[:, None]).flatten())
    values = padded.view(len(sessions), width, history.values.shape[1]) * mask[:, :, None]
    return Sessions(values, mask, ages, offsets)
