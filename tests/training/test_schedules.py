import numpy as np
import torch
from girih.runs.spans import Spans

from girih.data.batch import Batch
from girih.dense.halves.replica import Replica
from girih.training.schedules import in_step


class Half:
    """Both halves at once; its logits are not in host memory."""

    staleness = 0
    device = torch.device("meta")

    def targets(self, batch):
        return Replica.targets(self, batch)

    def pull(self, batch):
        return self

    def push(self, pulled, lr_scale):
        return self

    def wait(self):
        return self

    def forward(self, batch, embeddings):
        return torch.empty(batch.num_examples, 1, device="meta")

    def backward(self, gradient, loss, refused):
        return loss

    def apply(self):
        pass


def test_labels_and_example_weights_follow_the_logits_to_their_device():
    seen = []

    def loss(logits, labels, weights):
        seen.append((labels.device.type, None if weights is None else weights.device.type))
        return torch.tensor(0.5), logits

    def batch(example_weights):
        return Batch(
            ids=np.empty(0, np.int64),
            offsets=np.zeros(1, np.int32),
            numeric=np.empty((2, 0), np.float32),
            labels=np.ones((2, 1), np.float32),
            weights=None,
            example_weights=example_weights,
        )

    half = Half()
    batches = [(batch(None), 0), (batch(np.ones(2, np.float32)), 1)]
    steps = list(in_step(batches, half, half, loss, lambda: 1.0, Spans()))
    assert [step.loss for step in steps] == [0.5, 0.5]
    assert seen == [("meta", None), ("meta", "meta")]
