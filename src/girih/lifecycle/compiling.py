"""Kernels of a run, compiled before a step waits for them, so that no rate and no time of a phase counts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from girih.kernels.cpu import ahead
from girih.planner.plan import Plan
from girih.sparse.spec import SparseSpec


class Compiling:
    """Compiles what is not compiled yet.

    Args:
        log: takes a line about it, where it takes long.

    Attributes:
        seconds: that it took so far.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self._log = log

    def __call__(self, kernels: Sequence[str]) -> None:
        """Compiles kernels by their names, as those of :mod:`girih.kernels.cpu.ahead` are."""
        self.seconds += ahead.make_ready(kernels, self._log)

    def for_rows(self, sparse: SparseSpec) -> None:
        """Kernels of training by the optimizers and the tiers of rows."""
        specs = [group.spec for group in sparse.groups()]
        optimizers = ([segment.optimizer for segment in spec.segments] for spec in specs)
        evictions = (table.eviction for spec in specs for table in spec.tables)
        self(ahead.training(optimizers, evictions))
        if sparse.store.on_ssd:
            self(ahead.on_disk())
        if sparse.store.is_tiered and sparse.store.on_gpu:
            self(ahead.above_host())

    def for_wire(self, plan: Plan) -> None:
        """Kernels of the codecs that a plan has chosen."""
        if plan.wire.get("compress_ids") or "float16" in plan.wire.values():
            self(ahead.packing())
        if {plan.wire.get(kind, "float32") for kind in ("activations", "dense_gradients")} != {"float32"}:
            self(ahead.packing_tensors())
