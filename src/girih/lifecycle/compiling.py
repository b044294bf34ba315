"""Compiles the kernels of a run before a step needs them, so that compilation does not distort measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from girih.kernels.cpu import ahead
from girih.planner.plan import Plan
from girih.sparse.spec import SparseSpec


class Compiling:
    """Compiles kernels that are not compiled yet.

    Args:
        log: receives a line if compilation takes long.

    Attributes:
        seconds: total time of compilation so far.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self._log = log

    def __call__(self, kernels: Sequence[str]) -> None:
        """Compiles kernels by their names in :mod:`girih.kernels.cpu.ahead`."""
        self.seconds += ahead.make_ready(kernels, self._log)

    def for_rows(self, sparse: SparseSpec) -> None:
        """Compiles training kernels for the optimizers and tiers of rows."""
        specs = [group.spec for group in sparse.groups()]
        optimizers = ([segment.optimizer for segment in spec.segments] for spec in specs)
        evictions = (table.eviction for spec in specs for table in spec.tables)
        self(ahead.training(optimizers, evictions))
        if sparse.store.on_ssd:
            self(ahead.on_disk())
        if sparse.store.is_tiered and sparse.store.on_gpu:
            self(ahead.above_host())

    def for_wire(self, plan: Plan) -> None:
        """Compiles kernels of the codecs in a plan."""
        if plan.wire.get("compress_ids") or "float16" in plan.wire.values():
            self(ahead.packing())
        if {plan.wire.get(kind, "float32") for kind in ("activations", "dense_gradients")} != {"float32"}:
            self(ahead.packing_tensors())
