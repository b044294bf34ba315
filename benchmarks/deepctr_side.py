"""DeepCTR-Torch's DeepFM as a contestant of training: the steps of its own ``fit``, without its progress bar.

``import deepctr_torch`` asks the network for its latest version, through a package that it does not declare
(``requests``); a stand-in for that one function keeps the benchmark offline.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_sides import HIDDEN, NUMERIC, Task

from girih.data import Batch


def prevent_version_check() -> None:
    """Puts the stand-in where ``deepctr_torch`` will look."""
    quiet = ModuleType("deepctr_torch.utils")
    quiet.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules.setdefault("deepctr_torch.utils", quiet)


class DeepCTR:
    """Tables are ``nn.Embedding`` with dense gradients, its only way: every step moves every row of every table."""

    precision = "float32"
    BYTES_A_COLUMN = 16
    """Value, gradient, Adagrad's sum, and one temporary of its L2 term."""

    def __init__(self, task: Task, rows: int) -> None:
        inputs = importlib.import_module("deepctr_torch.inputs")
        kind = importlib.import_module("deepctr_torch.models").DeepFM
        self.rows, self.bag = rows, task.shape.bag
        columns: list[Any] = [
            inputs.SparseFeat(name, vocabulary_size=rows + 1, embedding_dim=task.dim) for name in task.names
        ]
        if self.bag > 1:
            columns = [inputs.VarLenSparseFeat(each, maxlen=self.bag, combiner="sum") for each in columns]
        columns += [inputs.DenseFeat(f"x{i}", 1) for i in range(NUMERIC)]
        self.model = kind(columns, columns, dnn_hidden_units=HIDDEN["deepfm"]["hidden"], task="binary")
        self.model.compile(torch.optim.Adagrad(self.model.parameters(), lr=0.01), "binary_crossentropy")
        self.model.train()

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        size = batch.num_examples
        ids = batch.ids.reshape(-1, size, self.bag).transpose(1, 0, 2).reshape(size, -1)
        ids = ids % self.rows + 1  # its sequences read 0 as padding
        return torch.from_numpy(
            np.concatenate([ids, batch.numeric], axis=1).astype(np.float32)
        ), torch.from_numpy(batch.labels)

    def step(self, prepared: tuple[Tensor, Tensor]) -> None:
        inputs, labels = prepared
        predicted = self.model(inputs).squeeze()
        self.model.optim.zero_grad()
        loss = self.model.loss_func(predicted, labels.squeeze(), reduction="sum")
        total = loss + self.model.get_regularization_loss() + self.model.aux_loss
        loss.item(), total.item()
        total.backward()
        self.model.optim.step()

    def close(self) -> None:
        return
