"""Devices for the operators of a model, where there are group servers: decided once, then held by the plan (HT §3.2.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from girih.dense.spec import DenseSpec
from girih.planner.facts import Facts
from girih.planner.operators import OperatorGraph
from girih.planner.plan import Plan, PlannedTagging
from girih.planner.tagging.tag import Tagged
from girih.sparse.spec import SparseSpec
from girih.strategies.strategy import Strategy
from girih.training.dense_cost import count_update, host_memory_bytes
from girih.training.example import operators_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNet:
    """The net of a run over the devices of a group.

    Attributes:
        plan: with its tagging. facts: with the operators and their devices. tagged: what speaks for these.
    """

    plan: Plan
    facts: Facts
    graph: OperatorGraph
    tagged: Tagged


def place_net(
    plan: Plan, strategy: Strategy, facts: Facts, sparse: SparseSpec, dense: DenseSpec
) -> PlacedNet:
    """Tags the operators of a model with devices, unless the plan has: then it is checked.

    Done by one trainer: it rests on this machine's memory, and on the optimizer's cost, counted here if ``facts`` lack it.

    Args:
        strategy: one whose group servers run operators, see :func:`girih.strategies.strategy.spreads_net`.

    Raises:
        ConfigError: the net does not fit into the memory of the group, or the plan does not fit the net.
    """
    if facts.dense_cost is None:
        cost = count_update(dense, facts.speeds)
        facts = replace(facts, dense_cost=cost, threads=torch.get_num_threads())
    spread: Any = strategy
    held = plan.tagging
    graph = operators_of(sparse.following(plan), dense, spread, None if held is None else held.cut)
    facts = replace(
        facts,
        graph=graph,
        tagging=None if held is None else held.devices,
        memory_bytes=host_memory_bytes(),
    )
    tagged: Tagged = spread.tagged(facts, plan.wire)
    tagging = PlannedTagging(devices=tagged.tagging, cut=graph.cut)
    return PlacedNet(
        plan=replace(plan, tagging=tagging),
        facts=replace(
            facts,
            tagging=tagged.tagging,
            wire={kind: plan.wire[kind] for kind in ("activations", "dense_gradients") if kind in plan.wire},
        ),
        graph=graph,
        tagged=tagged,
    )
