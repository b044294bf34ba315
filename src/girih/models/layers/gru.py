"""The gated recurrent unit, and the one whose update gate attention scales.

Shapes: L rows of all sequences together, D dim, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from girih.models.layers.steps import Steps


class GRU(nn.Module):
    """h_t = (1 − u_t) ⊙ h_{t−1} + u_t ⊙ h̃_t (DIEN, Interest Extractor Layer), h_0 = 0, with

        u_t = σ(W_u x_t + U_u h_{t−1} + b_u)    r_t = σ(W_r x_t + U_r h_{t−1} + b_r)
        h̃_t = tanh(W_h x_t + r_t ⊙ U_h h_{t−1} + b_h)

    Given attention a_t it is AUGRU, GRU with attentional update gate (DIEN, Interest Evolving Layer): a_t · u_t takes the
    place of u_t.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inputs = nn.Linear(dim, 3 * hidden)
        self.states = nn.Linear(hidden, 3 * hidden, bias=False)

    def forward(self, values: Tensor, steps: Steps, attention: Tensor | None = None) -> Tensor:
        """float32[L, D], and float32[L] where there is attention, to the state after each row, float32[L, H]."""
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
