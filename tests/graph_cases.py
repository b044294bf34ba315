"""Nets of the zoo with batches for them, and what a step computes."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace

import torch

from girih.hierarchical.graph import partition, trace
from girih.models.loss import Targets, loss_of
from girih.planner.operators import TRAINER, server_name
from models.zoo_cases import build, features_for, inputs_for, schema_of

OPTIONS = [
    ("dnn", {"dropout": 0.5, "batch_norm": True}),
    ("mmoe", {"dropout": 0.5, "batch_norm": True}),
    ("star", {"dropout": 0.5}),
]
"""Models that compute something else as they train."""


def traced(name, **options):
    """A model with the net that it was traced into on six examples, both to be trained, and batches for it."""
    case = _traced(name, **options)
    case.model.train()
    case.net.net.train()
    return case


@cache
def _traced(name, **options):
    schema = schema_of(features_for(name), 1 if name in ("lr", "fm", "two_tower", "retrieval") else 2)
    model = build(name, schema, **options)
    example = inputs_for(model, schema, num_examples=6)
    net = trace(model, example.numeric, example.embeddings)

    def batch(num_examples, seed=1):
        return inputs_for(model, schema, num_examples=num_examples, seed=seed)

    return SimpleNamespace(model=model, net=net, batch=batch)


def step(module, batch, parameters):
    """Logits, and the gradients of parameters and embeddings after a backward pass."""
    leaves = [*parameters, *batch.leaves.values()]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(5)
    logits = module(batch.numeric, batch.embeddings)
    if logits.shape[1] > 2:  # vectors to compare, as those of retrieval
        logits.square().mean().backward()
    else:
        labels = torch.arange(logits.numel()).view_as(logits) % 2
        loss_of(module)(logits, Targets(labels.to(logits.dtype), None)).backward()
    return logits.detach(), [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def equal(one, other):
    """Whether two steps are the same bit for bit."""
    return torch.equal(one[0], other[0]) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)
    )


def assert_close(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-12)
    for a, b in zip(one[1], other[1], strict=True):
        if a is None or b is None:  # a part gives gradients of 0 where the whole gives none
            assert not any(each.any() for each in (a, b) if each is not None)
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def tagging_of(net, device_of):
    """A tagging by a function of operators, which is asked once for all operators of a module."""
    devices, found = {}, {}
    for operator in net.graph.operators:
        device = device_of(operator) if operator.movable else TRAINER
        found[operator.name] = devices.setdefault(operator.module, device) if operator.module else device
    return found


def at_random(seed, servers=3, on_trainer=0.3):
    chosen = random.Random(seed)

    def device_of(operator):
        return TRAINER if chosen.random() < on_trainer else server_name(chosen.randrange(servers))

    return device_of


def partitioned(net, tagging):
    """The parts, and the trainer's partition, which has them run here."""
    found = partition(net, tagging)
    parts = {part.name: part for part in found.parts}

    def exchange(stage):
        outputs = []
        for name, inputs in stage:
            versions = [each._version for each in inputs]
            outputs.append(list(parts[name].module(*inputs)))
            assert (len(inputs), len(outputs[-1])) == (parts[name].inputs, parts[name].outputs)
            assert [each._version for each in inputs] == versions
        return outputs

    return found, found.trainer(exchange)
