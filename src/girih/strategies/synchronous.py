"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                          | schedule | dense half             |
| ``CollectiveSparse``, fed by rows    | in step  | ``AllReducedReplica`` |
| ``GpuCollectiveSparse``, the same    | the same | the same |

Equal to ``local`` on the same batches, up to the order of summation. With float16 on the wire, close to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps import in_step
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
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
    synchronous_traffic,
)

if TYPE_CHECKING:
    from girih.sparse.half import SparseHalf
    from girih.training.session import RunContext, Session


class Synchronous(StrategyOptions):
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: number of trainer processes; ``torchrun`` sets it.
        wire_embeddings: "float16" nearly halves the bytes of rows between trainers. The loss is at most 2⁻¹² of the largest
            number of each row (PICASSO §V).
        wire_gradients: the same for the gradients of rows.

    Examples:
        Start a program with this strategy with ``torchrun --nproc-per-node 2``.

        >>> import girih
        >>> strategy = girih.Synchronous(
        ...     trainers=2, wire_embeddings="float16", wire_gradients="float16"
        ... )
        >>> strategy.trainers, strategy.wire_embeddings
        (2, 'float16')
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
        """Makes the plan. Keys are hashed to trainers, regardless of the data.

        Raises:
            ConfigError: the options set an order of groups, but rows are in GPU memory.
        """
        on_gpu = device_of_rows(self, facts) == "gpu"
        if on_gpu and (option := ordering_option(facts.schedule)):
            raise ConfigError(
                f"schedule: {option}: rows in GPU memory are always exchanged in the order of groups, each group during the"
                " lookups of the next group; leave it out, or set store.tiers = ['dram']"
            )
        # calibrations measure links between processes, not between GPUs
        predicted = predicted_exchange(replace(facts, links=None) if on_gpu else facts, self._wire)
        return base_plan(self, facts, wire=self._wire, predicted=predicted)

    @property
    def _wire(self) -> dict[str, str]:
        return {"embeddings": self.wire_embeddings, "gradients": self.wire_gradients}

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step, in which rows, their gradients and dense gradients travel."""
        basis = Basis.of(facts, self.calibration_key)
        if basis is None:
            return None
        return in_step.synchronous(basis, synchronous_traffic(facts, basis.profile, self._wire))

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Builds this trainer's part of all tables, and its copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica
        from girih.training.feeds import ExampleFeed

        sparse, on_gpu = _sparse_half(plan, context)
        dense = AllReducedReplica(deferred_if(on_gpu, context.dense), context.ranks)
        # on GPUs, keys travel with the rows of the batch before, so their number is known by then
        most_ahead = 2 if is_on_gpu(plan) else 1
        return in_step_session(plan, sparse, dense, ExampleFeed(context.ranks), most_ahead=most_ahead)


def _sparse_half(plan: Plan, context: RunContext) -> tuple[SparseHalf, bool]:
    """Builds this trainer's part of all tables. Also returns whether the part is on the dense half's GPU."""
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
