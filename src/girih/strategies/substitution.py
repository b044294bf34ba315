"""``substitution``: weights never leave their trainer, partial results are aggregated (DES, Algorithm 1).

| sparse half                           | schedule | dense half             |
| ``FeatureParallelSparse``, fed by columns | in step  | ``SubstitutedReplica`` |

Equal to ``local`` on the same batches, to the order of sums. For models made of substitutable operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from girih.comm.context import RunContext
from girih.dense.halves.substituted import SubstitutedReplica
from girih.dense.options import OptimizerFactory
from girih.dense.substitution.speeds import measure_speeds
from girih.errors import ConfigError, nearest
from girih.planner import traffic
from girih.planner.placement import balanced, modulo
from girih.sparse.access_profile import AccessProfile
from girih.sparse.halves.feature_parallel import FeatureParallelSparse
from girih.sparse.spec import SparseSpec
from girih.strategies.counts import check_counts
from girih.training.feeds import FeatureFeed
from girih.training.schedules import Schedule, in_step

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "dense": ("auto", "replicated", "split"),
    "placement": ("balanced", "modulo"),
    "wire_partials": ("float32", "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """Trains on several trainers, each with the tables of its own features, whole.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts. At most as many as tables.
        dense: who computes the upper network of a training batch: "replicated", all alike and all of it (DES);
            "split", each for its share of the examples; "auto", what should take less time by what was measured.
        placement: of tables: "balanced" by what the first batches touch; "modulo", table t on trainer t mod N (DES §5).
        wire_partials: "bfloat16" halves partial results on the wire, and rounds them to 8 bits.
    """

    name: ClassVar[str] = "substitution"
    lockstep: ClassVar[bool] = True
    together: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, int]] = {}
    feed: ClassVar[type[FeatureFeed]] = FeatureFeed
    schedule: ClassVar[Schedule] = staticmethod(in_step)
    trainers: int = 1
    dense: Literal["auto", "replicated", "split"] = "auto"
    placement: Literal["balanced", "modulo"] = "balanced"
    wire_partials: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_counts(self, ("trainers",))
        for name, valid in OPTIONS.items():
            if getattr(self, name) not in valid:
                hint = nearest(str(getattr(self, name)), valid)
                raise ConfigError(f"strategy: {name} = {getattr(self, name)!r}{hint}")

    def sparse_half(self, spec: SparseSpec, context: RunContext) -> FeatureParallelSparse:
        """This trainer's tables, still to be placed."""
        return FeatureParallelSparse(spec, context.ranks)

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, context: RunContext, **options: Any
    ) -> SubstitutedReplica:
        """This trainer's operators and its copy of the upper network, still to be placed."""
        half = self.wire_partials == "bfloat16"
        return SubstitutedReplica(module, optimizer, ranks=context.ranks, half=half, **options)

    def place(
        self,
        sparse: FeatureParallelSparse,
        dense: SubstitutedReplica,
        spec: SparseSpec,
        touched: AccessProfile | None,
    ) -> None:
        """Decides who owns what; all trainers call it together.

        Args:
            touched: what a step touches, where that is known; else tables go by number.
        """
        if touched is None or self.placement == "modulo":
            placement = modulo(spec.schema, sparse.ranks.size, dense.together)
        else:
            placement = balanced(spec.schema, sparse.ranks.size, touched.loads(), dense.together)
        sparse.place(placement)
        dense.place(placement, spec.schema)

    def divide(self, dense: SubstitutedReplica, batch_size: int, decided: bool | None) -> None:
        """Decides who computes what; all trainers call it together.

        Args:
            decided: what "auto" was found to be before, where this is a run that goes on.
        """
        if self.dense == "auto":
            dense.split = _split_pays(dense, batch_size) if decided is None else decided
        else:
            dense.split = self.dense == "split"

    def plan(
        self, dense: SubstitutedReplica, touched: AccessProfile | None, batch_size: int
    ) -> dict[str, Any]:
        """Who owns what, and the bytes that a trainer sends a step, by this strategy and by ``synchronous``."""
        placement = dense.placement
        own = traffic.substitution(
            batch_size,
            placement.num_ranks,
            summed=dense.num_columns("sum"),
            concatenated=dense.num_columns("concat"),
            shared_parameters=sum(p.numel() for p in dense.shared),
            split=dense.split,
            partial_bytes=dense.partial_bytes,
        )
        plan: dict[str, Any] = {
            "dense": "split" if dense.split else "replicated",
            "owners": dict(placement.owners),
            "bytes_per_step": round(own.total),
            "bytes": asdict(own),
        }
        if touched is not None:
            keys = touched.rows_of_share
            other = traffic.synchronous(
                placement.num_ranks,
                keys=sum(keys.values()),
                numbers=sum(count * touched.widths[name] for name, count in keys.items()),
                parameters=dense.num_parameters,
            )
            plan |= {"synchronous_bytes_per_step": round(other.total), "synchronous_bytes": asdict(other)}
        return plan


def _split_pays(dense: SubstitutedReplica, batch_size: int) -> bool:
    flops = 6 * sum(p.numel() for p in dense.shared if p.dim() > 1)  # two products backward for one forward
    return traffic.split_pays(
        batch_size,
        dense.ranks.size,
        shared_parameters=sum(p.numel() for p in dense.shared),
        flops_per_example=flops,
        speeds=measure_speeds(dense.ranks),
    )
