"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                          | schedule | dense half             |
| ``CollectiveSparse``, fed by rows    | in step  | ``AllReducedReplica`` |
| ``GpuCollectiveSparse``, the same    | the same | the same, or ``DeferredAllReducedReplica`` |

Equal to ``local`` on the same batches, to the order of sums; near it where rows travel as float16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from girih.errors import ConfigError
from girih.planner import costs, traffic
from girih.planner.facts import AccessProfile, Facts
from girih.planner.interleaving import arrange, micro_batches
from girih.planner.plan import Plan
from girih.planner.speed import in_step
from girih.planner.speed.step import Basis, StepCost
from girih.strategies.strategy import (
    TRAINER,
    Processes,
    StrategyOptions,
    ahead_of,
    base_plan,
    device_of_rows,
    is_on_gpu,
    predicted_bytes,
    predicted_times,
    steps_of,
)

if TYPE_CHECKING:
    from girih.sparse.half import SparseHalf
    from girih.training.session import RunContext, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous(StrategyOptions):
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts.
        wire_embeddings, wire_gradients: "float16" nearly halves the rows, and gradients of rows, that go between trainers,
            with a loss of up to 2⁻¹² of the largest number of each row (PICASSO §V).
    """

    name: ClassVar[str] = "synchronous"
    interleaves: ClassVar[bool] = True
    cuts_from: ClassVar[tuple[str, ...]] = ("embedding", "mlp")
    prefetches: ClassVar[bool] = True
    keeps_rows_on_gpu: ClassVar[bool] = True
    scales: ClassVar[Mapping[str, str]] = {TRAINER: "trainers"}
    trainers: Processes = 1
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    def plan(self, facts: Facts) -> Plan:
        """Keys are hashed to trainers, whatever the data.

        Raises:
            ConfigError: an order of groups that is asked for with rows in GPU memory.
        """
        wire = {"embeddings": self.wire_embeddings, "gradients": self.wire_gradients}
        asked, on_gpu = facts.schedule, device_of_rows(self, facts) == "gpu"
        if on_gpu and (asked.interleaving_groups != 1 or asked.excluded):
            name = "excluded" if asked.interleaving_groups == 1 else "interleaving_groups"
            raise ConfigError(
                f"schedule: {name}: with rows in GPU memory each group's rows are exchanged beside the lookups of the next one,"
                " in the order of groups; leave it out, or set store.tiers = ['dram']"
            )
        # links are measured between processes, not between GPUs
        predicted = predicted_of(replace(facts, links=None) if on_gpu else facts, self._half_of)
        return base_plan(self, facts, wire=wire, predicted=predicted)

    @property
    def _half_of(self) -> list[str]:
        wire = {"embeddings": self.wire_embeddings, "gradients": self.wire_gradients}
        return [kind for kind, dtype in wire.items() if dtype == "float16"]

    def step_cost(self, facts: Facts) -> StepCost | None:
        """A step as the cost model has it; None where facts do not say enough."""
        basis = Basis.of(facts)
        if basis is None:
            return None
        if facts.num_trainers == 1:
            return in_step.local(basis)
        sent = _sent(facts, basis.profile, self._half_of)
        seconds, num_exchanges = _seconds(replace(facts, links=basis.calibration.links), sent)
        others = facts.num_trainers - 1
        return in_step.synchronous(basis, sent, seconds, num_messages=others * num_exchanges)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """This trainer's part of all tables, and its copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica
        from girih.dense.halves.deferred import DeferredAllReducedReplica
        from girih.training.feeds import ExampleFeed
        from girih.training.schedules import in_step
        from girih.training.session import Session

        sparse, on_gpu = _sparse_half(plan, context)
        # under "skip", the number of the next update depends on what came of this one
        late = on_gpu and context.dense.on_nonfinite == "stop"
        dense = (DeferredAllReducedReplica if late else AllReducedReplica)(context.dense, context.ranks)
        options = {**steps_of(plan), "deferred": late}
        if options.get("prefetch") and is_on_gpu(plan):
            options["prefetch"] = (
                2  # the next batch's keys travel with this one's rows, so that their number is known by then
            )
        feed, schedule = ExampleFeed(context.ranks), in_step(**options)
        return Session(sparse=sparse, dense=dense, schedule=schedule, feed=feed, optimizer=dense.optimizer)


def _sparse_half(plan: Plan, context: RunContext) -> tuple[SparseHalf, bool]:
    """This trainer's part of all tables, on the device that the plan says, and whether that is the GPU of the dense half."""
    here = (context.sparse, context.ranks, context.stats)
    options = {
        "float16_embeddings": plan.wire["embeddings"] == "float16",
        "float16_gradients": plan.wire["gradients"] == "float16",
        **ahead_of(plan),
    }
    if is_on_gpu(plan):
        from girih.sparse.halves.gpu_collective import GpuCollectiveSparse

        half = GpuCollectiveSparse(*here, **options)
        return half, half.is_on_gpu_of(context.dense.device)
    from girih.sparse.halves.collective import CollectiveSparse

    half_of_hosts = CollectiveSparse(
        *here,
        hosts=plan.hosts_of(TRAINER),
        interleaving=plan.schedule.get("interleaving", ()),
        excluded=plan.schedule.get("excluded", ()),
        **options,
    )
    return half_of_hosts, False


def predicted_of(facts: Facts, half_of: Collection[str] = ()) -> dict[str, Any]:
    """Bytes that a trainer sends per step of this strategy, and their time; empty where nothing was measured.

    Args:
        half_of: "embeddings", "gradients": what travels as float16.
    """
    if facts.profile is None:
        return {}
    sent = _sent(facts, facts.profile, half_of)
    predicted = predicted_bytes(sent)
    if facts.links is not None:
        predicted |= predicted_times(_seconds(facts, sent)[0])
    return predicted


def _sent(facts: Facts, profile: AccessProfile, half_of: Collection[str]) -> traffic.Traffic:
    return traffic.synchronous(
        facts.num_trainers,
        keys=profile.keys_of_share,
        numbers=profile.numbers_of_share,
        parameters=facts.model.num_parameters,
        half_of=half_of,
    )


def _seconds(facts: Facts, sent: traffic.Traffic) -> tuple[Mapping[str, float], int]:
    """Seconds of a step's communication by calibrated links, by kind; and how many exchanges of rows it has."""
    arranged = arrange(facts)
    cut = facts.schedule.micro_batches_from == "embedding"
    num_sets = len(arranged.interleaving) + bool(arranged.excluded)
    parts = micro_batches(facts)[0] if cut else 1
    seconds = costs.synchronous_step(
        sent, facts.num_trainers, facts.links or {}, num_sets=num_sets, micro_batches=parts
    )
    return seconds, 2 + num_sets * parts + num_sets
