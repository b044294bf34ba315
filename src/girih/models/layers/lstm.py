"""Long short-term memory, in one direction and in both.

Shapes: L rows of all sequences together, D dim, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models.embeddings import Jagged
from girih.models.layers.steps import Steps


class LSTM(nn.Module):
    """h_t = o_t ⊙ tanh(c_t), c_t = f_t ⊙ c_{t−1} + i_t ⊙ g_t, h_0 = c_0 = 0, with

    (i_t, f_t, o_t) = σ(W x_t + U h_{t−1} + b)    g_t = tanh(W_g x_t + U_g h_{t−1} + b_g)
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inputs = nn.Linear(dim, 4 * hidden)
        self.states = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, values: Tensor, steps: Steps) -> Tensor:
        """float32[L, D] to the state after each row, float32[L, H]."""
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
    """[h_t forwards, h_t backwards]: each row with what lies before it and what lies behind it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.forwards = LSTM(dim, hidden)
        self.backwards = LSTM(dim, hidden)

    def forward(self, sequences: Jagged) -> Tensor:
        """Sequences of L rows to float32[L, 2 · H]."""
        values, steps = sequences.values, Steps.of(sequences)
        mirrored = _mirrored(sequences)
        backwards = self.backwards(values.index_select(0, mirrored), steps).index_select(0, mirrored)
        return torch.cat([self.forwards(values, steps), backwards], dim=1)


def _mirrored(sequences: Jagged) -> Tensor:
    """The row at each row's place once every sequence is turned round, int64[L]."""
    begins, ends = (bounds.index_select(0, sequences.examples()) for bounds in (sequences.offsets[:-1], sequences.offsets[1:]))  # fmt: skip
    return begins + ends - 1 - torch.arange(len(begins), device=begins.device)
