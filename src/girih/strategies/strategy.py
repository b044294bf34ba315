"""Interface of strategies: each plans first, then builds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from girih.config.bounds import Bounds
from girih.config.options import Options
from girih.config.train import ScheduleOptions
from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.interleaving import arrange, micro_batches
from girih.planner.plan import Plan
from girih.planner.speed.step import Prediction, StepCost, predict, with_overhead
from girih.planner.traffic import Traffic

if TYPE_CHECKING:  # a plan needs no live object
    from girih.sparse.options import StoreOptions
    from girih.training.session import RunContext, Session

Processes = Annotated[int, Bounds(1, 1024)]
"""Number of processes of one role."""
TRAINER = "trainer"


@runtime_checkable
class Strategy(Protocol):
    """A way to interlace training. Any class with these members works, by name from a file as models are.

    Attributes:
        name: as ``[strategy]`` and ``summary.json`` have it.
        trainers: how many it wants; 1 takes as many as were started.
    """

    name: ClassVar[str]

    @property
    def trainers(self) -> int: ...

    def plan(self, facts: Facts) -> Plan:
        """Decides everything that can be decided; pure: starts no process, touches no tensor.

        Raises:
            ConfigError: the facts do not go together with this strategy.
        """
        ...

    def build(self, plan: Plan, context: RunContext) -> Session:
        """This trainer's halves, schedule and feed; called by all trainers together."""
        ...


class StrategyOptions(Options):
    """Base of girih's own strategies, whose options are checked."""

    __slots__ = ()

    def _owner(self) -> str:
        return "strategy: "

    @classmethod
    def with_trainers(cls, count: int) -> tuple[Strategy, ...]:
        """Ways to train with so many trainers, other options left as they are: what ``girih plan`` compares."""
        return (cls(trainers=count),)  # type: ignore[return-value]


def measures_of(strategy: Strategy, schedule: ScheduleOptions | None = None) -> frozenset[str]:
    """Facts that are to be measured before a strategy plans: of "profile" and "dense_cost"; its attribute ``measures``.

    Args:
        schedule: adds those that it rests on.
    """
    return frozenset(getattr(strategy, "measures", ())) | (
        measures_for(schedule) if schedule else frozenset()
    )


def measures_for(schedule: ScheduleOptions) -> frozenset[str]:
    """Facts that ``[schedule]`` rests on, whatever the strategy and the number of trainers."""
    wanted = {"profile"} if schedule.interleaving_groups != 1 else set()
    if "auto" in (schedule.interleaving_groups, schedule.micro_batches):
        wanted |= {"profile", "dense_cost"}
    return frozenset(wanted)


def price(strategy: Strategy, facts: Facts) -> Prediction | None:
    """The speed that is predicted; None where facts do not say enough, or the strategy has no method ``step_cost(facts)``."""
    own: Any = strategy
    cost: StepCost | None = own.step_cost(facts) if hasattr(strategy, "step_cost") else None
    if cost is None or facts.calibration is None:
        return None
    overhead = facts.calibration.overheads.get(way_of(strategy))
    if overhead is not None:
        cost = with_overhead(cost, overhead, facts)
    return predict(cost, facts.calibration.cores)


def way_of(strategy: Strategy) -> str:
    """The way to train, for which overheads are calibrated; its attribute ``way``, or its name."""
    way: str = getattr(strategy, "way", strategy.name)
    return way


def one_at_a_time(strategy: Strategy) -> Strategy:
    """The same with one step of each trainer under way, by its method of that name; as it is where it has none."""
    own: Any = strategy
    alone: Strategy = own.one_at_a_time() if hasattr(strategy, "one_at_a_time") else strategy
    return alone


def spreads_net(strategy: Strategy) -> bool:
    """Whether operators of the model run in other processes than trainers; its attribute ``spreads_net``.

    Such a strategy has two methods more: ``rewritten(traced, optimizer, cut)``, the net that is spread, and ``tagged(facts, wire)``,
    where its operators run; see :class:`girih.strategies.hierarchical.Hierarchical`. What they say is in the plan that is built from.
    """
    return bool(getattr(strategy, "spreads_net", False))


def roles_of(strategy: Strategy) -> Mapping[str, int]:
    """Processes beside the trainers, by role; its attribute ``roles``."""
    roles: Mapping[str, int] = getattr(strategy, "roles", {})
    return roles


def one_host(strategy: Strategy) -> str:
    """The option that keeps all processes on one host, as the user would write it; "" where none does."""
    return "strategy: transport = 'shared'" if getattr(strategy, "transport", None) == "shared" else ""


def outlives_trainers(strategy: Strategy) -> Collection[str]:
    """Roles that keep what they hold when a trainer is killed and all trainers begin anew; its attribute ``outlives_trainers``."""
    names: Collection[str] = getattr(strategy, "outlives_trainers", ())
    return names


def scales(strategy: Strategy) -> Mapping[str, str]:
    """Roles whose number may change while a run is on → the option that says it; its attribute ``scales``.

    Where trainers are left as they are, a strategy with a method ``rescale(plan, context, session, before)`` gives the session a new feed and
    new processes beside the trainers, as many as the plan says, which hold no rows yet where there are more or fewer embedding servers
    than in the plan ``before``; without it all processes begin anew.
    """
    names: Mapping[str, str] = getattr(strategy, "scales", {})
    return names


def scaled(strategy: Strategy, counts: Mapping[str, int]) -> Strategy:
    """The same with other numbers of processes; of a dataclass, where there are any.

    Raises:
        ConfigError: it has no such role, or not so many of it.
    """
    names = scales(strategy)
    for role in counts:
        if role not in names:
            told = f"expected one of {', '.join(names)}" if names else "nothing of it is scaled"
            raise ConfigError(f"strategy {strategy.name!r} has no {role} whose number could change; {told}")
    if not counts:
        return strategy
    own: Any = strategy
    found: Strategy = replace(own, **{names[role]: count for role, count in counts.items()})
    return found


def runs_alone(strategy: Strategy) -> bool:
    """Whether each process trains for itself, whatever ``torchrun`` has started; its attribute ``alone``."""
    return bool(getattr(strategy, "alone", False))


def base_plan(strategy: Strategy, facts: Facts, **decided: Any) -> Plan:
    """A plan with what every strategy says alike: groups, and what ``[schedule]`` says of them, added to ``schedule``.

    Orders of groups are for strategies with an attribute ``interleaves`` that is true, whose halves keep them; micro-batches
    for those whose ``cuts_from`` has the layer that they begin at; prefetching for those whose ``prefetches`` is true; rows in
    GPU memory for those whose ``keeps_rows_on_gpu`` is.

    Raises:
        ConfigError: the model's own loss does not support this strategy, or the strategy what ``[schedule]`` asks for.
    """
    supported = facts.model.loss_strategies
    if supported is not None and strategy.name not in supported:
        raise ConfigError(
            f"strategy: {strategy.name}: the loss of {facts.model.name} supports {', '.join(supported)} only"
        )
    asked = facts.schedule
    _refuse_cuts(strategy, facts)
    interleaves = getattr(strategy, "interleaves", False)
    if (asked.interleaving_groups != 1 or asked.excluded) and not interleaves:
        name = "excluded" if asked.interleaving_groups == 1 else "interleaving_groups"
        raise ConfigError(
            f"schedule: {name}: under strategy {strategy.name!r} trainers exchange nothing group by group, so no order of"
            f" groups helps; leave it out, or use 'synchronous'"
        )
    device = device_of_rows(strategy, facts)
    arranged = arrange(facts)
    own: Any = strategy
    options: dict[str, Any] = asdict(own) if is_dataclass(own) else {}  # type: ignore[arg-type]
    measured = {"profile": facts.profile, "dense_cost": facts.dense_cost}
    count, why = micro_batches(facts)
    hosts = {f"{TRAINER} {rank}": host for rank, host in enumerate(facts.hosts)}
    defaults: dict[str, Any] = {
        "roles": {TRAINER: facts.num_trainers, **roles_of(strategy)},
        "hosts": hosts if len(set(facts.hosts)) > 1 else {},
        "groups": tuple(
            {"name": group.name, "tables": list(group.tables), "dim": group.dim, "device": device}
            for group in arranged.groups
        ),
        "asked": asdict(asked),
        "schedule": {"name": "in_step"},
        "feed": {"name": "examples"},
        "seeds": {"run": facts.seed, "dropout": "per_rank"},
        "measured": {name: asdict(found) for name, found in measured.items() if found is not None},
    }
    plan = Plan(strategy=strategy.name, options=options, **(defaults | decided))
    schedule = {
        "micro_batches": count,
        "micro_batches_from": asked.micro_batches_from,
        "prefetch": asked.prefetch and getattr(strategy, "prefetches", False),
        **(arranged.schedule() if interleaves else {}),
    }
    predicted = {} if facts.profile is None else arranged.predicted()
    predicted |= {"micro_batches": {"why": why}} if why else {}
    return replace(plan, schedule={**plan.schedule, **schedule}, predicted={**plan.predicted, **predicted})


def device_of_rows(strategy: Strategy, facts: Facts) -> str:
    """The device of all groups: the one that is asked for, or that of the dense half where rows may be there.

    Raises:
        ConfigError: rows are to be in GPU memory, and the strategy has them elsewhere.
    """
    may = getattr(strategy, "keeps_rows_on_gpu", False)
    if facts.rows_on == "gpu" and not may:
        raise ConfigError(
            f"store: tiers: strategy {strategy.name!r} keeps no rows in GPU memory; use 'local' or 'synchronous', or tiers"
            " without 'gpu'"
        )
    return facts.rows_on or ("gpu" if may and facts.device == "cuda" else "cpu")


def note_on_rows(strategy: Strategy, facts: Facts, store: StoreOptions) -> str | None:
    """A line where rows could be in GPU memory beside the dense half, and an option that is not about that keeps them away."""
    may = getattr(strategy, "keeps_rows_on_gpu", False)
    given = [name for name in ("shards", "arena") if getattr(store, name) is not None]
    if not may or facts.device != "cuda" or store.tiers is not None or not given:
        return None
    return (
        f"rows stay in the host's memory, as store.{' and store.'.join(given)} asks: leave that out to have them in the GPU's,"
        " or set store.tiers = ['dram']"
    )


def _refuse_cuts(strategy: Strategy, facts: Facts) -> None:
    """Refuses micro-batches that a strategy or a model cannot have."""
    asked, layers = facts.schedule, getattr(strategy, "cuts_from", ())
    if asked.micro_batches == 1:
        return
    if facts.model.loss_strategies is not None:
        raise ConfigError(
            f"schedule: micro_batches = {asked.micro_batches!r}: the loss of {facts.model.name} is of a whole batch, not a sum"
            " over its examples; set micro_batches = 1"
        )
    if asked.micro_batches_from not in layers:
        raise ConfigError(
            f"schedule: micro_batches_from = {asked.micro_batches_from!r}: strategy {strategy.name!r} cuts batches from"
            f" {' or '.join(map(repr, layers)) or 'no layer'} on; "
            + (f"set it to {layers[0]!r}" if layers else "set micro_batches = 1")
        )


def is_on_gpu(plan: Plan) -> bool:
    """Whether a plan has rows in GPU memory."""
    return any(group["device"] == "gpu" for group in plan.groups)


def steps_of(plan: Plan) -> dict[str, Any]:
    """The options of a plan's schedule for :func:`girih.training.schedules.in_step`."""
    names = ("micro_batches", "prefetch")
    return {name: plan.schedule[name] for name in names if name in plan.schedule}


def ahead_of(plan: Plan) -> dict[str, Any]:
    """The options of ``ShardedHalf`` by which a sparse half works ahead."""
    laid_out = plan.schedule
    cut = laid_out.get("micro_batches_from") == "embedding"
    return {
        "micro_batches": laid_out.get("micro_batches", 1) if cut else 1,
        "ahead": laid_out.get("prefetch", False),
    }


def predicted_bytes(traffic: Traffic) -> dict[str, Any]:
    """Bytes that a trainer sends per step, for ``Plan.predicted``."""
    return {"bytes_per_step": round(traffic.total), "bytes": asdict(traffic)}


def predicted_times(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Milliseconds that a step's communication takes by calibrated links, for ``Plan.predicted``."""
    by_kind = {kind: 1e3 * each for kind, each in seconds.items()}
    return {"communication_ms_per_step": sum(by_kind.values()), "communication_ms": by_kind}
