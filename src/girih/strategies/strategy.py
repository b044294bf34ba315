"""Base class of strategies. A strategy plans first, then builds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from girih.config.bounds import Bounds
from girih.config.options import Options
from girih.config.train import ScheduleOptions
from girih.errors import ConfigError
from girih.planner import costs, traffic
from girih.planner.calibration import Links
from girih.planner.facts import AccessProfile, Facts
from girih.planner.interleaving import arrange, exchanges_of, micro_batches
from girih.planner.plan import Plan
from girih.planner.simulator.hosts import Hosts
from girih.planner.simulator.prediction import Prediction, predict
from girih.planner.steps.graph import StepGraph
from girih.planner.traffic import FLOAT32, Traffic, Wire

if TYPE_CHECKING:  # plans need no live objects
    from girih.dense.half import DenseHalf, DenseSpec
    from girih.planner.operators import OperatorGraph
    from girih.planner.tagging.tag import Tagged
    from girih.sparse.half import SparseHalf
    from girih.sparse.options import StoreOptions
    from girih.sparse.spec import SparseSpec
    from girih.training.feeds import ExampleFeed
    from girih.training.session import RunContext, Session


Processes = Annotated[int, Bounds(1, 1024)]
"""Number of processes of one role."""
TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities that a strategy has with any options. Code outside ``strategies/`` checks these and never the name.

    Attributes:
        standalone: each process trains for itself, even if ``torchrun`` started several.
        interleaving: trainers exchange rows group by group, so ``[schedule]`` may order the groups.
        micro_batch_layers: values of ``micro_batches_from`` that the strategy supports; empty means no micro-batches.
        prefetching: the ids of the next batch are prepared while this batch is computed.
        rows_on_gpu: rows may be in GPU memory.
        scalable_roles: role → the option with its number of processes, for roles that ``girih scale`` may change.
        scales_in_place: the strategy has ``rescale``, so trainers stay when the number of other processes changes.
        surviving_roles: roles that keep their state when a trainer is killed and all trainers restart.
    """

    standalone: bool = False
    interleaving: bool = False
    micro_batch_layers: tuple[str, ...] = ()
    prefetching: bool = False
    rows_on_gpu: bool = False
    scalable_roles: Mapping[str, str] = field(default_factory=dict)
    scales_in_place: bool = False
    surviving_roles: tuple[str, ...] = ()


class Strategy(ABC):
    """Base class of strategies. To write your own, make a subclass, and name its file in the config.

    A subclass has a name, ``plan`` and ``build``. Everything else has a default.

    Attributes:
        name: the name in ``[strategy]`` and ``summary.json``.
        capabilities: abilities that the strategy has with any options.

    Examples:
        A strategy that trains in one process, like :class:`girih.Local`, and logs its plan:

        >>> import girih
        >>> class Logged(girih.strategies.Strategy):
        ...     name = "logged"
        ...
        ...     def plan(self, facts):
        ...         plan = girih.Local().plan(facts)
        ...         print("trainers:", plan.roles["trainer"])
        ...         return plan
        ...
        ...     def build(self, plan, context):
        ...         return girih.Local().build(plan, context)
        >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
        >>> with girih.Trainer(girih.models.LR(schema), strategy=Logged()) as trainer:
        ...     print(trainer.strategy.name)
        trainers: 1
        logged
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def plan(self, facts: Facts) -> Plan:
        """Decides everything that can be decided. Pure: starts no process, touches no tensor.

        Args:
            facts: the schema, the model, the number of trainers and the measurements of :attr:`required_facts`.

        Raises:
            ConfigError: this strategy does not support the facts.
        """

    @abstractmethod
    def build(self, plan: Plan, context: RunContext) -> Session:
        """Builds this trainer's halves, schedule and feed. All trainers call it together.

        Args:
            plan: the result of :meth:`plan`, the same on all trainers.
            context: the live objects of this process: ranks, model, tables and the other processes.
        """

    @property
    def trainers(self) -> int:
        """Number of trainers; 1 means as many as were started."""
        return 1

    @property
    def roles(self) -> Mapping[str, int]:
        """Number of processes besides the trainers, by role."""
        return {}

    @property
    def required_facts(self) -> frozenset[str]:
        """Facts to measure before ``plan``: "profile", "dense_cost", "graph"."""
        return frozenset()

    @property
    def calibration_key(self) -> str:
        """The name of this strategy's overhead in a calibration."""
        return self.name

    @property
    def places_operators(self) -> bool:
        """True if operators of the model run outside trainers. Then the strategy has ``operator_graph`` and ``tag_operators``."""
        return False

    @property
    def one_host_option(self) -> str:
        """The option that keeps all processes on one host, for errors; "" if there is none."""
        return ""

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work and the messages of one step, for the simulator; None if facts are missing."""
        return None

    def without_pipelining(self) -> Strategy:
        """Returns this strategy with one step of each trainer in flight."""
        return self

    def with_counts(self, counts: Mapping[str, int]) -> Self:
        """Returns this strategy with other numbers of processes, by role.

        Args:
            counts: role → number of its processes.

        Raises:
            ConfigError: it cannot scale one of the roles, or not to this number.
        """
        options = self.capabilities.scalable_roles
        for role in counts:
            if role not in options:
                expected = f"expected one of {', '.join(options)}" if options else "it cannot be scaled"
                raise ConfigError(
                    f"strategy {self.name!r} cannot change its number of {role} processes; {expected}"
                )
        changed = {options[role]: count for role, count in counts.items()}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def rescale(self, plan: Plan, context: RunContext, session: Session, before: Plan) -> Session:
        """Starts and ends processes besides the trainers so that they match ``plan``. Needs ``capabilities.scales_in_place``.

        New embedding servers have no rows yet.

        Args:
            plan: the plan to reach.
            context: see :meth:`build`.
            session: the session so far.
            before: the plan so far.

        Returns:
            The session with a new feed.

        Raises:
            NotImplementedError: this strategy does not have the method.
        """
        raise NotImplementedError

    def operator_graph(
        self, sparse: SparseSpec, dense: DenseSpec, cut: Sequence[str] | None = None
    ) -> OperatorGraph:
        """Traces the model on an example batch. Needs ``places_operators``.

        Args:
            sparse: the tables.
            dense: the model and its optimizer.
            cut: layers to split; None lets the strategy choose.

        Raises:
            ConfigError: a layer in ``cut`` is not fully connected.
            NotImplementedError: this strategy does not have the method.
        """
        raise NotImplementedError

    def tag_operators(self, facts: Facts, wire: Mapping[str, str] | None = None) -> Tagged:
        """Decides where the operators in ``facts.graph`` run; keeps ``facts.tagging`` if set. Needs ``places_operators``.

        Args:
            facts: see :meth:`plan`.
            wire: the codecs of a plan; None means those in the options.

        Raises:
            ConfigError: the net does not fit into the group's memory, or ``facts.tagging`` does not fit the net.
            NotImplementedError: this strategy does not have the method.
        """
        raise NotImplementedError


class StrategyOptions(Options, Strategy):
    """Base of girih's own strategies: dataclasses with checked options."""

    owner = "strategy: "

    @classmethod
    def with_trainers(cls, count: int) -> tuple[Strategy, ...]:
        """Returns variants with this number of trainers and default options, which ``girih plan`` compares."""
        return (cls(trainers=count),)


def facts_for_schedule(schedule: ScheduleOptions) -> frozenset[str]:
    """Returns the facts to measure for ``[schedule]``, with any strategy and number of trainers."""
    required = {"profile"} if schedule.interleaving_groups != 1 else set()
    if "auto" in (schedule.interleaving_groups, schedule.micro_batches):
        required |= {"profile", "dense_cost"}
    return frozenset(required)


def price(strategy: Strategy, facts: Facts, hosts: Hosts | None = None, **options: Any) -> Prediction | None:
    """Predicts the speed; None if facts are missing, or the strategy has no ``step_graph``.

    Args:
        hosts: the hosts of the run; None means the calibrated machines.
        options: see :func:`girih.planner.simulator.result.simulate`.
    """
    graph = strategy.step_graph(facts)
    return None if graph is None else predict(graph, facts, hosts, **options)


def base_plan(strategy: Strategy, facts: Facts, **decided: Any) -> Plan:
    """Makes the part of a plan that all strategies share: groups, and ``[schedule]`` if the capabilities allow it.

    Args:
        decided: fields of the plan that this strategy decides.

    Raises:
        ConfigError: the model's own loss does not support this strategy, or the strategy does not support ``[schedule]``.
    """
    supported = facts.model.loss_strategies
    if supported is not None and strategy.name not in supported:
        raise ConfigError(
            f"strategy: {strategy.name}: the loss of {facts.model.name} supports {', '.join(supported)} only"
        )
    asked, capabilities = facts.schedule, strategy.capabilities
    _refuse_micro_batches(strategy, facts)
    if not capabilities.interleaving and (option := ordering_option(asked)):
        raise ConfigError(
            f"schedule: {option}: strategy {strategy.name!r} does not exchange rows group by group, so the order of"
            f" groups has no effect; leave it out, or use 'synchronous'"
        )
    device = device_of_rows(strategy, facts)
    arranged = arrange(facts)
    measured = {"profile": facts.profile, "dense_cost": facts.dense_cost}
    count, why = micro_batches(facts)
    hosts = {f"{TRAINER} {rank}": host for rank, host in enumerate(facts.hosts)}
    defaults: dict[str, Any] = {
        "options": asdict(strategy) if is_dataclass(strategy) else {},
        "roles": {TRAINER: facts.num_trainers, **strategy.roles},
        "hosts": hosts if len(set(facts.hosts)) > 1 else {},
        "groups": tuple(
            {"name": group.name, "tables": list(group.tables), "dim": group.dim, "device": device}
            for group in arranged.groups
        ),
        "asked": asdict(asked),
        "schedule": {"name": "in_step"},
        "feed": {"name": "examples"},
        "seeds": {"run": facts.seed, "dropout": "per_rank"},
        "measured": {name: asdict(fact) for name, fact in measured.items() if fact is not None},
    }
    plan = Plan(strategy=strategy.name, **(defaults | decided))
    schedule = {
        "micro_batches": count,
        "micro_batches_from": asked.micro_batches_from,
        "prefetch": asked.prefetch and capabilities.prefetching,
        **(arranged.schedule() if capabilities.interleaving else {}),
    }
    predicted = {} if facts.profile is None else arranged.predicted()
    predicted |= {"micro_batches": {"why": why}} if why else {}
    return replace(plan, schedule={**plan.schedule, **schedule}, predicted={**plan.predicted, **predicted})


def ordering_option(schedule: ScheduleOptions) -> str:
    """Returns the option of ``[schedule]`` that orders groups; "" if none does."""
    if schedule.interleaving_groups != 1:
        return "interleaving_groups"
    return "excluded" if schedule.excluded else ""


def device_of_rows(strategy: Strategy, facts: Facts) -> str:
    """Returns the device of all rows: the requested one, or the dense half's if the strategy supports rows there.

    Raises:
        ConfigError: rows in GPU memory are requested, and the strategy does not support them.
    """
    supported = strategy.capabilities.rows_on_gpu
    if facts.rows_on == "gpu" and not supported:
        raise ConfigError(
            f"store: tiers: strategy {strategy.name!r} keeps no rows in GPU memory; use 'local' or 'synchronous', or tiers"
            " without 'gpu'"
        )
    return facts.rows_on or ("gpu" if supported and facts.device == "cuda" else "cpu")


def note_on_rows(strategy: Strategy, facts: Facts, store: StoreOptions) -> str | None:
    """Returns a hint if rows could be in GPU memory, but another option keeps them in host memory."""
    if not strategy.capabilities.rows_on_gpu or facts.device != "cuda" or store.tiers is not None:
        return None
    options = {"shards": store.shards, "arena": store.arena}
    causes = [f"store.{name}" for name, value in options.items() if value is not None]
    if not causes:
        return None
    return (
        f"rows stay in host memory because of {' and '.join(causes)}: leave that out to keep them in GPU memory,"
        " or set store.tiers = ['dram']"
    )


def _refuse_micro_batches(strategy: Strategy, facts: Facts) -> None:
    """Refuses micro-batches that the strategy or the model does not support."""
    asked, layers = facts.schedule, strategy.capabilities.micro_batch_layers
    if asked.micro_batches == 1:
        return
    if facts.model.loss_strategies is not None:
        raise ConfigError(
            f"schedule: micro_batches = {asked.micro_batches!r}: the loss of {facts.model.name} needs a whole batch and is not a sum"
            " over its examples; set micro_batches = 1"
        )
    if asked.micro_batches_from not in layers:
        raise ConfigError(
            f"schedule: micro_batches_from = {asked.micro_batches_from!r}: strategy {strategy.name!r} cuts batches from"
            f" {' or '.join(map(repr, layers)) or 'no layer'} on; "
            + (f"set it to {layers[0]!r}" if layers else "set micro_batches = 1")
        )


def is_on_gpu(plan: Plan) -> bool:
    """Returns whether a plan has rows in GPU memory."""
    return any(group["device"] == "gpu" for group in plan.groups)


def in_step_session(
    plan: Plan, sparse: SparseHalf, dense: DenseHalf, feed: ExampleFeed, *, most_ahead: int = 1
) -> Session:
    """Joins halves and a feed in step.

    Args:
        most_ahead: number of batches to prepare before they are pulled, if the plan prefetches.
    """
    from girih.training.schedules import in_step
    from girih.training.session import Session

    prefetch = most_ahead if plan.schedule.get("prefetch", False) else 0
    schedule = in_step(plan.schedule.get("micro_batches", 1), prefetch=prefetch)
    return Session(sparse=sparse, dense=dense, schedule=schedule, feed=feed, optimizer=dense.optimizer)


def deferred_if(on_gpu: bool, spec: DenseSpec) -> DenseSpec:
    """Returns the spec, with deferred outcomes if the half is on a GPU and a refused step ends the run.

    With "skip", the number of the next update depends on whether this update is applied.
    """
    return replace(spec, deferred=on_gpu and spec.on_nonfinite == "stop")


def half_options(plan: Plan) -> dict[str, Any]:
    """Returns the options for ``ShardedHalf`` from a plan: micro-batches and prefetching."""
    schedule = plan.schedule
    cut = schedule.get("micro_batches_from") == "embedding"
    return {
        "micro_batches": schedule.get("micro_batches", 1) if cut else 1,
        "ahead": schedule.get("prefetch", False),
    }


def predicted_traffic(sent: Traffic, seconds: Mapping[str, float] | None) -> dict[str, object]:
    """Returns entries for ``Plan.predicted``: the bytes that a trainer sends per step, and the time of sending.

    Args:
        sent: the bytes per step.
        seconds: the seconds per step of each kind of message. None without calibrated links; then no time is returned.
    """
    predicted: dict[str, object] = {"bytes_per_step": round(sent.total), "bytes": asdict(sent)}
    if seconds is not None:
        by_kind = {kind: 1e3 * kind_s for kind, kind_s in seconds.items()}
        predicted |= {"communication_ms_per_step": sum(by_kind.values()), "communication_ms": by_kind}
    return predicted


def predicted_exchange(facts: Facts, wire: Wire = FLOAT32) -> dict[str, object]:
    """Returns the result of :func:`predicted_traffic` for ``synchronous``. Without a profile, returns an empty dict.

    Args:
        wire: the number formats of embeddings and gradients.
    """
    if facts.profile is None:
        return {}
    sent = synchronous_traffic(facts, facts.profile, wire)
    seconds = None if facts.links is None else _synchronous_seconds(facts, sent, facts.links)
    return predicted_traffic(sent, seconds)


def synchronous_traffic(facts: Facts, profile: AccessProfile, wire: Wire) -> Traffic:
    """Returns the bytes that a trainer of ``synchronous`` sends per step.

    Args:
        wire: the number formats of embeddings and gradients.
    """
    return traffic.synchronous(
        facts.num_trainers,
        keys=profile.keys_of_share,
        numbers=profile.numbers_of_share,
        parameters=facts.model.num_parameters,
        wire=wire,
    )


def _synchronous_seconds(facts: Facts, sent: Traffic, links: Links) -> Mapping[str, float]:
    """Returns the seconds of communication per step of ``synchronous``, by kind. The kind "dense" overlaps a pass."""
    num_sets, parts = exchanges_of(facts)
    return costs.synchronous_step(sent, facts.num_trainers, links, num_sets=num_sets, micro_batches=parts)
