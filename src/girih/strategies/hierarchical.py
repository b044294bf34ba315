"""``hierarchical``: a few copies of the dense parameters, each trained by many nets, averaged in the background (HT).

| sparse half                      | schedule        | dense half                      |
| ``RemoteSparse``, dispatched     | concurrent nets | ``HogwildReplica``, or          |
|                                  |                 | ``GroupedReplica``              |

With one trainer per group and no group servers, this is the EASGD-based system that HT starts from (§2.2): each trainer has
a copy. Trainers share no step, the same as in ``asynchronous``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from girih.cluster.roles import FAIL, RELOAD_ALL, FailurePolicy, RoleName
from girih.config.bounds import Bounds
from girih.errors import ConfigError
from girih.planner import memory
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps import served
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
from girih.planner.steps.group import spread, tagged
from girih.planner.tagging.tag import Tagged
from girih.planner.traffic import FLOAT_BYTES
from girih.strategies.grouping import choose_codecs, start_group_servers, trace_split
from girih.strategies.remote import RemoteStrategy
from girih.strategies.strategy import Capabilities, Processes, Strategy

if TYPE_CHECKING:
    from girih.dense.half import DenseSpec
    from girih.hierarchical.graph import TracedNet
    from girih.hierarchical.grouped import GroupedReplica
    from girih.planner.operators import OperatorGraph
    from girih.services.dense_server import DenseServer
    from girih.sparse.options import StoreOptions
    from girih.sparse.spec import SparseSpec
    from girih.training.session import RunContext, Session

DENSE = RoleName.DENSE_SERVER
GROUP_SERVER_DEFAULTS: Mapping[str, Any] = {
    "split_fc": "auto",
    "tagging": "refined",
    "wire_activations": "float32",
    "wire_dense_gradients": "float32",
}
"""Options of group servers → the value that they must have without group servers."""


class Hierarchical(RemoteStrategy):
    """Trains groups of trainers, each with one copy of the dense parameters.

    Each net's gradients are those of the mean loss over its own batch: a trainer's share of ``data.batch_size`` examples.

    Attributes:
        groups: number of copies of the dense parameters.
        trainers_per_group: number of trainers that share a copy.
        servers_per_group: number of group servers that hold a copy; 0: its trainer holds it.
        nets: number of batches that a trainer trains on at once, each in a thread, without locks.
        dense_servers: number of processes that average the copies; none start if there is one copy.
        averaging: the algorithm: "easgd", "ma" or "bmuf".
        elastic_rate: the fraction of the way to the centre, or the average, that a copy moves in a round; None means 0.9 /
            ``groups`` for "easgd", else 1.
        average_every_steps: number of a trainer's steps from one round to the next.
        split_fc: the fully connected layers that are cut into parts for several group servers (HT §4.1): layers too large to
            spread evenly ("auto"), all (true), or none (false).
        tagging: the way in which operators are assigned to devices (HT §3.2.1): by rules and refinement, by rules, or round-robin.
        wire_activations: codec of activations between trainers and group servers (HT §4.2). "auto" lets the plan choose by
            a calibration, and means float32 without a calibration.
        wire_dense_gradients: codec of their gradients, in the backward pass; "auto" as above.

    Examples:
        Two trainers have a copy each, and a dense server averages the copies.

        >>> import girih
        >>> strategy = girih.Hierarchical(groups=2, nets=4, average_every_steps=20)
        >>> strategy.trainers, strategy.dense_servers
        (2, 1)
    """

    name: ClassVar[str] = "hierarchical"
    in_step: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = replace(RemoteStrategy.capabilities, micro_batch_layers=())
    waits_for_dense: ClassVar[bool] = False
    groups: Processes = 1
    trainers_per_group: Processes = 1
    servers_per_group: Annotated[int, Bounds(0, 1024)] = 0
    nets: Annotated[int, Bounds(1, 1024)] = 1
    dense_servers: Processes = 1
    averaging: Literal["easgd", "ma", "bmuf"] = "easgd"
    elastic_rate: Annotated[float, Bounds(0, 1, open_low=True)] | None = None
    average_every_steps: Annotated[int, Bounds(1, 1 << 40)] = 10
    split_fc: Literal["auto"] | bool = "auto"
    tagging: Literal["refined", "rules", "none"] = "refined"
    wire_activations: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    wire_dense_gradients: Literal["float32", "bfloat16", "topk", "auto"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainers_per_group > 1 and not self.servers_per_group:
            raise ConfigError(
                f"strategy: trainers_per_group = {self.trainers_per_group}: several trainers can share a dense copy only with group servers,"
                f" but servers_per_group = 0; set trainers_per_group = 1 and groups = {self.groups * self.trainers_per_group}"
            )
        for name, default in GROUP_SERVER_DEFAULTS.items():
            if getattr(self, name) != default and not self.servers_per_group:
                raise ConfigError(
                    f"strategy: {name} = {getattr(self, name)!r}: this option is for group servers, but servers_per_group = 0; drop it,"
                    " or set servers_per_group to at least 1"
                )

    @classmethod
    def with_trainers(cls, count: int) -> tuple[Strategy, ...]:
        """Returns two variants: a copy per trainer (HT's baseline, §2.2), and one group with as many servers as trainers (§3.1)."""
        return cls(groups=count), cls(trainers_per_group=count, servers_per_group=count)

    @property
    def required_facts(self) -> frozenset[str]:
        """The model's operators, if they are needed to choose codecs."""
        return frozenset({"graph"} if "auto" in (self.wire_activations, self.wire_dense_gradients) else ())

    @property
    def calibration_key(self) -> str:
        """The name in calibrations. Group servers are calibrated separately."""
        return "hierarchical, group servers" if self.servers_per_group else self.name

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return self.groups * self.trainers_per_group

    @property
    def places_operators(self) -> bool:
        """True if group servers run operators of the model."""
        return self.servers_per_group > 0

    @property
    def roles(self) -> Mapping[str, int]:
        """Number of processes besides the trainers, by role."""
        averaging: dict[str, int] = {DENSE: self.dense_servers} if self.groups > 1 else {}
        grouped: dict[str, int] = {}
        if self.servers_per_group:
            grouped = {RoleName.GROUP_SERVER: self.groups * self.servers_per_group}
        return {**super().roles, **averaging, **grouped}

    def failure_policy(self, role: str, store: StoreOptions, num_trainers: int) -> FailurePolicy:
        """Returns what happens when a process of this role dies. Loaders restart; for other roles all trainers restart.

        A group server has the only copy of its parameters, and a dense server has the centre of all copies. Servers cannot
        recognize resent pushes, because nets overtake each other without a bound.
        """
        policy = super().failure_policy(role, store, num_trainers)
        return RELOAD_ALL if policy is FAIL else policy

    def plan(self, facts: Facts) -> Plan:
        """Makes the plan. Keys are hashed to servers, and dense parameters are divided over dense servers in equal ranges.

        Raises:
            ConfigError: a GPU, ``compile``, ``global_batch_norm``, another number of trainers, or too little memory.
        """
        if facts.device != "cpu":
            raise ConfigError("strategy 'hierarchical' computes on CPUs only; set train.device = 'cpu'")
        if facts.compile:
            raise ConfigError(
                "strategy 'hierarchical': nets share parameters that change while they compute, which cannot be compiled; set"
                " train.compile = false, or use 'hybrid'"
            )
        if facts.num_trainers != self.trainers:
            raise ConfigError(
                f"strategy: groups = {self.groups}, trainers_per_group = {self.trainers_per_group}: expected"
                f" {self.trainers} trainers, but {facts.num_trainers} were started; change one of the two"
            )
        if facts.global_batch_norm and self.trainers * self.nets > 1:
            raise ConfigError(
                "strategy 'hierarchical': trainers and nets share no step, so batch norm sees only each net's own examples;"
                " drop train.global_batch_norm, or use 'hybrid'"
            )
        copies = memory.Copies(**{field.name: getattr(self, field.name) for field in fields(memory.Copies)})
        memory.check(facts, copies, self.name)
        plan = super().plan(facts)
        if not self.servers_per_group:
            return plan
        wire, why = choose_codecs(facts, asdict(self))
        predicted = {"wire": {"why": why}} if why else {}
        return replace(plan, wire={**plan.wire, **wire}, predicted={**plan.predicted, **predicted})

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step; None if group servers run operators that are not known."""
        basis = Basis.of(facts, self.calibration_key)
        if basis is None:
            return None
        service = self._service(basis)
        averaging = served.AveragingLoad(
            copies=self.groups,
            holders=max(1, self.servers_per_group),
            every_steps=self.average_every_steps,
            servers=self.dense_servers if self.groups > 1 else 0,
        )
        if not self.servers_per_group:
            return served.replicas(basis, service, nets=self.nets, averaging=averaging)
        if facts.graph is None:
            return None
        wire = facts.wire or choose_codecs(facts, asdict(self))[0]
        options = asdict(self) | {f"wire_{kind}": codec for kind, codec in wire.items()}
        net = spread(facts.graph, self.tag_operators(facts, wire), facts, options)
        return served.grouped(basis, service, net, nets=self.nets, averaging=averaging, clips=facts.clips)

    def operator_graph(
        self, sparse: SparseSpec, dense: DenseSpec, cut: Sequence[str] | None = None
    ) -> OperatorGraph:
        """Traces the net, with fully connected layers in parts, into the operators that group servers run."""
        from girih.dense.halves.replica import made_by
        from girih.hierarchical.graph import split_as, split_fc

        optimizer = type(made_by(dense.optimizer, [p for p in dense.module.parameters() if p.requires_grad]))

        def split(net: TracedNet) -> TracedNet:
            if cut is not None:
                return split_fc(net, self.servers_per_group, cut)
            return split_as(self.split_fc, net, self.servers_per_group, optimizer.__name__)

        return trace_split(dense.module, sparse, dense.precision, split).graph

    def tag_operators(self, facts: Facts, wire: Mapping[str, str] | None = None) -> Tagged:
        """Decides where the operators of the model run.

        Raises:
            ConfigError: ``facts`` has no operators, or the net does not fit into the group's memory.
        """
        if facts.graph is None:
            raise ConfigError(
                "strategy: hierarchical: the model's operators are not known; trace the model first"
            )
        options = asdict(self)
        if wire is not None:
            options |= {f"wire_{kind}": wire[kind] for kind in ("activations", "dense_gradients")}
        return tagged(facts.graph, facts, options, facts.tagging)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Connects to the embedding workers, and to the servers of this trainer's group, or copies the dense half without them."""
        from girih.comm.registry.remote import connect_all
        from girih.hierarchical.grouped import GroupedReplica
        from girih.hierarchical.hogwild import HogwildReplica
        from girih.training.concurrent import Concurrent

        context.ranks.set_unsynchronized()
        processes, nets = context.processes, plan.schedule["nets"]
        addresses = self._start_dense_servers(plan, context)
        dense: GroupedReplica | HogwildReplica
        if self.servers_per_group:
            dense = start_group_servers(
                plan, context, addresses, self._policy(RoleName.GROUP_SERVER, context)
            )
        else:
            dense = HogwildReplica(
                context.dense,
                context.ranks,
                nets=nets,
                servers=connect_all(DENSE, addresses, secret=processes.secret, registry=processes.registry),
                average_every_steps=self.average_every_steps,
            )
        session = self.session(plan, context, dense, Concurrent(nets))
        return replace(
            session,
            detach_from_round=dense.leave,
            stateful=dense if isinstance(dense, GroupedReplica) else None,
        )

    def _planned_schedule(self) -> dict[str, object]:
        return {"name": "concurrent", "nets": self.nets}

    def _dense_bytes(self, facts: Facts, sent: float) -> float:
        """Bytes per step of a trainer. In a round, its group sends the parameters to dense servers and receives updates."""
        num_bytes = 2.0 * facts.model.num_parameters * FLOAT_BYTES / self.average_every_steps
        return num_bytes / self.trainers_per_group if self.groups > 1 else 0.0

    def _start_dense_servers(self, plan: Plan, context: RunContext) -> tuple[str, ...]:
        if DENSE not in plan.roles:
            return ()
        from girih.services.dense_server import DenseServer

        secret = context.processes.secret

        def server(index: int, address: str) -> DenseServer:
            return DenseServer(
                index=index, num_replicas=self.groups, averaging=self.averaging, rate=self.elastic_rate,
                address=address, secret=secret,
            )  # fmt: skip

        return self._start(plan, context, DENSE, plan.roles[DENSE], server)
