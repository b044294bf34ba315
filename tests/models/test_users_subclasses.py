"""Subclasses of girih's models that users write."""

from collections.abc import Callable

import pytest
import torch

import girih
from girih.errors import ConfigError

SCHEMA = girih.Schema([girih.Categorical(name="user", dim=4)], "click")


class Squashed(girih.models.DNN):
    """Has an option whose type no config can have."""

    def __init__(self, schema, *, act: Callable[[torch.Tensor], torch.Tensor] = torch.relu, **options):
        super().__init__(schema, **options)
        self.act = act

    def forward(self, numeric, embeddings):
        """Squashes the logits."""
        return self.act(super().forward(numeric, embeddings))


def test_an_option_may_have_any_type():
    assert Squashed(SCHEMA, act=torch.tanh, hidden=(8,)).act is torch.tanh


def test_options_of_girihs_own_models_are_checked():
    with pytest.raises(ConfigError, match="dropout"):
        girih.models.DNN(SCHEMA, dropout=2.0)
