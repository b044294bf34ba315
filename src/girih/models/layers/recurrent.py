"""Recurrent layers over sequences without padding: GRU, AUGRU, LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from girih.models.embeddings import Jagged


class Steps(NamedTuple):
    """The order in which steps take rows.

    Attributes:
        order: int64[L], the rows in the order of steps. places: int64[L], the place of each row in this order.
        sizes: the number of rows of each step, never rising. Without rows there is one empty step, so that a layer's
            parameters get a gradient (of zeros) in every batch.
    """

    order: Tensor
    places: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, sequences: Jagged) -> Steps:
        """Returns the steps through some sequences."""
        longest_first = sequences.offsets.diff().argsort(descending=True, stable=True)
        positions = sequences.positions()
        sizes = positions.bincount()  # each sequence that is longer than a position has a row there
        begins = sizes.cumsum(0) - sizes
        ranks = _inverse(longest_first).index_select(0, sequences.examples())
        places = begins.index_select(0, positions) + ranks
        return cls(_inverse(places), places, sizes.tolist() or [0])

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Splits rows by step: [L, ...] to tensors of ``sizes`` rows."""
        return torch.split(rows.index_select(0, self.order), self.sizes)

    def joined(self, steps: list[Tensor]) -> Tensor:
        """Inverts :meth:`split`."""
        return torch.cat(steps).index_select(0, self.places)


def _inverse(permutation: Tensor) -> Tensor:
    numbers = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)


class Recurrent(nn.Module):
    """The weights of a recurrent layer for each of its gates: for the input, with biases, and for the state."""

    gates: ClassVar[int]

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inputs = nn.Linear(dim, self.gates * hidden)
        self.states = nn.Linear(hidden, self.gates * hidden, bias=False)


class GRU(Recurrent):
    """h_t = (1 − u_t) ⊙ h_{t−1} + u_t ⊙ h̃_t (DIEN, Interest Extractor Layer), h_0 = 0, with

        u_t = σ(W_u x_t + U_u h_{t−1} + b_u)    r_t = σ(W_r x_t + U_r h_{t−1} + b_r)
        h̃_t = tanh(W_h x_t + r_t ⊙ U_h h_{t−1} + b_h)

    With attention a_t it is AUGRU, GRU with attentional update gate (DIEN, Interest Evolving Layer): a_t · u_t replaces
    u_t.
    """

    gates = 3

    def forward(self, values: Tensor, steps: Steps, attention: Tensor | None = None) -> Tensor:
        """Maps float32[L, D], and optional attention float32[L], to the state after each row, float32[L, H]."""
        inputs = steps.split(self.inputs(values))
        scales = steps.split(attention[:, None]) if attention is not None else [None] * len(inputs)
        state = values.new_zeros(steps.sizes[0], self.hidden)
        states = []
        for x, scale in zip(inputs, scales, strict=True):
            state = self._step(x, state[: len(x)], scale)
            states.append(state)
        return steps.joined(states)

    def _step(self, x: Tensor, state: Tensor, attention: Tensor | None) -> Tensor:
        x_update, x_reset, x_new = x.chunk(3, dim=1)
        h_update, h_reset, h_new = self.states(state).chunk(3, dim=1)
        update, reset = torch.sigmoid(x_update + h_update), torch.sigmoid(x_reset + h_reset)
        new = torch.tanh(x_new + reset * h_new)
        if attention is not None:
            update = attention * update
        return state + update * (new - state)


class LSTM(Recurrent):
    """h_t = o_t ⊙ tanh(c_t), c_t = f_t ⊙ c_{t−1} + i_t ⊙ g_t, h_0 = c_0 = 0, with

    (i_t, f_t, o_t) = σ(W x_t + U h_{t−1} + b)    g_t = tanh(W_g x_t + U_g h_{t−1} + b_g)
    """

    gates = 4

    def forward(self, values: Tensor, steps: Steps) -> Tensor:
        """Maps float32[L, D] to the state after each row, float32[L, H]."""
        state = cell = values.new_zeros(steps.sizes[0], self.hidden)
        states = []
        for x in steps.split(self.inputs(values)):
            gates = x + self.states(state[: len(x)])
            enter, forget, show, new = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell[: len(x)] + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(show) * torch.tanh(cell)
            states.append(state)
        return steps.joined(states)


class BiLSTM(nn.Module):
    """[h_t forwards, h_t backwards]: each row with its context before and after it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.forwards = LSTM(dim, hidden)
        self.backwards = LSTM(dim, hidden)

    def forward(self, sequences: Jagged) -> Tensor:
        """Maps sequences of L rows to float32[L, 2 · H]."""
        values, steps = sequences.values, Steps.of(sequences)
        mirrored = _mirrored(sequences)
        backwards = self.backwards(values.index_select(0, mirrored), steps).index_select(0, mirrored)
        return torch.cat([self.forwards(values, steps), backwards], dim=1)


def _mirrored(sequences: Jagged) -> Tensor:
    """Returns, for each row, the row at its place in the reversed sequence, int64[L]."""
    begins, ends = (bounds.index_select(0, sequences.examples()) for bounds in (sequences.offsets[:-1], sequences.offsets[1:]))  # fmt: skip
    return begins + ends - 1 - torch.arange(len(begins), device=begins.device)
