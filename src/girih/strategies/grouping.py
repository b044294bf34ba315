"""The dense half of ``hierarchical`` with group servers: traces the net, cuts it as planned, starts the servers (HT §3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from girih.cluster.roles import FailurePolicy, RoleName
from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps.group import group_of, net_examples, timed
from girih.planner.tagging.wires import choose_wire, codec_of
from girih.strategies.remote import address_of

if TYPE_CHECKING:
    from torch import nn

    from girih.dense.halves.replica import Replica
    from girih.hierarchical.graph import Partitioned, TracedNet
    from girih.hierarchical.grouped import GroupedReplica
    from girih.hierarchical.wire import Wire
    from girih.sparse.spec import SparseSpec
    from girih.training.session import RunContext

GROUP = RoleName.GROUP_SERVER
ACTIVATIONS, GRADIENTS = ("float32", "bfloat16", "int8"), ("float32", "bfloat16", "topk")
"""Codecs that "auto" chooses from, the most precise first."""
AUTO, AGAIN = (
    "auto took",
    "girih plan --calibration FILE --out PLAN chooses a codec, and girih train --plan PLAN uses it",
)


def start_group_servers(
    plan: Plan, context: RunContext, dense_servers: Sequence[str], policy: FailurePolicy
) -> GroupedReplica:
    """Starts the group servers and connects this trainer to those of its group. All trainers call it together.

    Args:
        dense_servers: addresses of the servers that average the groups; empty with one group.
        policy: what happens when a group server dies.

    Raises:
        ConfigError: group servers do not support the optimizer, or an operator with parameters; or the plan has no tagging.
    """
    from girih.dense.halves.replica import Replica, begin_as_first
    from girih.hierarchical.group_client import GroupClient
    from girih.hierarchical.grouped import GroupedReplica, check_moved
    from girih.hierarchical.wire import Wire

    ranks, processes, options = context.ranks, context.processes, plan.options
    begin_as_first(context.dense.module, ranks)
    whole = Replica(context.dense)
    partitioned = _partition_net(plan, context, whole)
    check_moved(partitioned.trainer(lambda stage: []))
    wire = Wire(activations=plan.wire["activations"], gradients=plan.wire["dense_gradients"])
    addresses = _start_servers(plan, context, whole, partitioned, wire, dense_servers, policy)
    group, place = divmod(ranks.rank, options["trainers_per_group"])
    first = group * options["servers_per_group"]
    servers = GroupClient(
        partitioned.parts,
        addresses[first : first + options["servers_per_group"]],
        secret=processes.secret,
        first=first,
        registry=processes.registry,
        wire=wire,
        stats=context.stats,
    )
    return GroupedReplica(
        whole, context.dense, partitioned, servers, ranks, leads=place == 0, averaged=bool(dense_servers)
    )


def choose_codecs(facts: Facts, options: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Chooses the codecs between trainers and group servers, for ``Plan.wire``. Also returns the reason, if any was "auto".

    The choice rests on calibrated codecs, links and cores, with all processes on one machine.
    """
    asked = {"activations": options["wire_activations"], "dense_gradients": options["wire_dense_gradients"]}
    if "auto" not in asked.values():
        return asked, ""
    calibration, graph = facts.calibration, facts.graph
    if calibration is None or graph is None or not calibration.codecs:
        plain = {kind: "float32" if name == "auto" else name for kind, name in asked.items()}
        return plain, f"{AUTO} float32: the speed of this machine's codecs is not known; {AGAIN}"
    forward, backward = (
        [codec_of(each, calibration) for each in (choices if name == "auto" else (name,))]
        for name, choices in zip(asked.values(), (ACTIVATIONS, GRADIENTS), strict=True)
    )
    net, group = timed(graph, facts, net_examples(facts, options)), group_of(graph, facts, options)
    chosen = choose_wire(net, group, activations=forward, gradients=backward, how=options["tagging"])
    names = {"activations": chosen.wire.activations.name, "dense_gradients": chosen.wire.gradients.name}
    return names, f"{AUTO} {chosen.why}"


def trace_split(
    module: nn.Module, sparse: SparseSpec, precision: str, split: Callable[[TracedNet], TracedNet]
) -> TracedNet:
    """Traces a model on an example batch, and splits its layers."""
    import torch

    from girih.hierarchical.graph import trace
    from girih.sparse.groups.leaves import example_of

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        return split(trace(module, *example_of(sparse)))


def _partition_net(plan: Plan, context: RunContext, whole: Replica) -> Partitioned:
    """Cuts the net into the parts that the plan gives to the devices."""
    from girih.hierarchical.graph import partition, split_fc

    if plan.tagging is None:
        raise ConfigError("plan: no tagging, but group servers need it; make the plan again with girih plan")
    num_servers, cut = plan.options["servers_per_group"], plan.tagging.cut
    net = trace_split(
        whole.module, context.sparse, context.dense.precision, lambda net: split_fc(net, num_servers, cut)
    )
    return partition(net, plan.tagging.devices)


def _start_servers(
    plan: Plan,
    context: RunContext,
    whole: Replica,
    partitioned: Partitioned,
    wire: Wire,
    dense_servers: Sequence[str],
    policy: FailurePolicy,
) -> tuple[str, ...]:
    from girih.hierarchical.grouped import parts_on, recipe_of
    from girih.services.group_server import AveragedWith, GroupServer

    processes, options = context.processes, plan.options
    recipe, num_servers = recipe_of(whole, partitioned), options["servers_per_group"]
    num_nets = options["trainers_per_group"] * options["nets"]

    every_steps = options["average_every_steps"] * options["trainers_per_group"]

    def averaging(index: int) -> AveragedWith | None:
        group, place = divmod(index, num_servers)
        if not dense_servers:
            return None
        return AveragedWith(
            servers=dense_servers,
            group=group,
            place=place,
            every_steps=every_steps,
            trainers=options["trainers_per_group"],
        )

    def servers() -> list[GroupServer]:
        return [
            GroupServer(
                parts=parts_on(partitioned, index % num_servers),
                index=index,
                recipe=recipe,
                num_nets=num_nets,
                address=address_of(plan, processes, GROUP, index),
                secret=processes.secret,
                precision=context.dense.precision,
                forward=context.dense.forward,
                wire=wire,
                averaging=averaging(index),
                seed=plan.seeds["run"] + context.ranks.size + index,  # trainers have the seeds before these
            )
            for index in range(plan.roles[GROUP])
        ]

    return processes.start(GROUP, servers, policy)
