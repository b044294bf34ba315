"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                          | schedule | dense half             |
| ``CollectiveSparse``, fed by rows    | in step  | ``AllReducedReplica`` |
| ``GpuCollectiveSparse``, the same    | the same | the same |

Equal to ``local`` on the same batches, to the order of sums; near it where rows travel as float16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.speed import in_step
from girih.planner.speed.step import Basis, StepCost
from girih.strategies.strategy import (
    TRAINER,
    Capabilities,
    Processes,
    StrategyOptions,
    base_plan,
    deferred_if,
    device_of_rows,
    half_options,
    in_step_session,
    is_on_gpu,
    ordering_option,
    predicted_exchange,
)

if TYPE_CHECKING:
    from girih.sparse.half import SparseHalf
    from girih.training.session import RunContext, Session


class Synchronous(StrategyOptions):
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts.
        wire_embeddings, wire_gradients: "float16" nearly halves the rows, and gradients of rows, that go between trainers,
            with a loss of up to 2⁻¹² of the largest number of each row (PICASSO §V).
    """

    name: ClassVar[str] = "synchronous"
    capabilities: ClassVar[Capabilities] = Capabilities(
        interleaving=True,
        micro_batch_layers=("embedding", "mlp"),
        prefetching=True,
        rows_on_gpu=True,
        scalable_roles={TRAINER: "trainers"},
    )
    trainers: Processes = 1
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    def plan(self, facts: Facts) -> Plan:
        """Keys are hashed to trainers, whatever the data.

        Raises:
            ConfigError: an order of groups that is asked for with rows in GPU memory.
        """
        on_gpu = device_of_rows(self, facts) == "gpu"
        if on_gpu and (option := ordering_option(facts.schedule)):
            raise ConfigError(
                f"schedule: {option}: with rows in GPU memory each group's rows are exchanged beside the lookups of the next one,"
                " in the order of groups; leave it out, or set store.tiers = ['dram']"
            )
        # links are measured between processes, not between GPUs
        predicted = predicted_exchange(replace(facts, links=None) if on_gpu else facts, self._wire)
        return base_plan(self, facts, wire=self._wire, predicted=predicted)

    @property
    def _wire(self) -> dict[str, str]:
        return {"embeddings": self.wire_embeddings, "gradients": self.wire_gradients}

    def step_cost(self, basis: Basis) -> StepCost:
        """Estimates the cost of a step, of which rows, their gradients and dense gradients travel."""
        return in_step.synchronous(basis, self._wire)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """This trainer's part of all tables, and its copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica
        from girih.training.feeds import ExampleFeed

        sparse, on_gpu = _sparse_half(plan, context)
        dense = AllReducedReplica(deferred_if(on_gpu, context.dense), context.ranks)
        # on GPUs keys travel with the rows of the batch before, so their number is known by then
        most_ahead = 2 if is_on_gpu(plan) else 1
        return in_step_session(plan, sparse, dense, ExampleFeed(context.ranks), most_ahead=most_ahead)


def _sparse_half(plan: Plan, context: RunContext) -> tuple[SparseHalf, bool]:
    """This trainer's part of all tables, and whether it is on the dense half's GPU."""
    common = (context.sparse, context.ranks, context.stats)
    options = {
        "float16_embeddings": plan.wire["embeddings"] == "float16",
        "float16_gradients": plan.wire["gradients"] == "float16",
        **half_options(plan),
    }
    if is_on_gpu(plan):
        from girih.sparse.halves.gpu_collective import GpuCollectiveSparse

        half = GpuCollectiveSparse(*common, **options)
        return half, half.is_on_gpu_of(context.dense.device)
    from girih.sparse.halves.collective import CollectiveSparse

    collective = CollectiveSparse(
        *common,
        hosts=plan.hosts_of(TRAINER),
        interleaving=plan.schedule.get("interleaving", ()),
        excluded=plan.schedule.get("excluded", ()),
        **options,
    )
    return collective, False
