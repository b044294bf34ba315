"""Storage of rows: ``[store]`` of a config."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from girih.config.bounds import Bounds, Count
from girih.config.options import Options
from girih.config.sections import plain
from girih.errors import ConfigError
from girih.files.whole import disk_full
from girih.runs.directory import TIERS
from girih.store import File, GroupSpec, Heap, Shared, Store, Tiers
from girih.store.gpu.options import Gpu, GpuTier

HotRows = Annotated[int, Bounds(0)]
MOST_THREADS = 8
TIERS_HELD = (("gpu",), ("dram",), ("dram", "ssd"), ("gpu", "dram"), ("gpu", "dram", "ssd"))


class StoreOptions(Options):
    """Options of the store: the number of shards, and the memory that holds rows.

    Attributes:
        shards: number of parts of every table, by key, with one thread each, from 1 to 256. Results depend on it only if
            a table has ``max_rows``: each shard holds its part of them, rounded up. None takes as many as torch has threads in
            a trainer, or as there are cores, at most 8. It takes one if ``max_rows`` or ``reserve_rows`` bounds the rows.
        arena: "heap" is private memory; "file" maps files below ``directory``, so that tables may outgrow memory;
            "shared" is shared memory, for embedding servers: it outlives a process that is killed. None takes
            "shared" in embedding servers, "heap" elsewhere.
        directory: the directory of the files of arena "file". The files have no names, and end with the process.
            Checkpoints keep rows.
        reserve_rows: limit of the rows of a shard's group; None reserves as many as memory (or disk) could hold.
        tiers: the storage of values, hot to cold: ``["dram"]``, ``["dram", "ssd"]`` for tables larger than memory,
            ``["gpu"]`` for rows in the memory of the trainer's GPU, ``["gpu", "dram"]`` or ``["gpu", "dram", "ssd"]`` for
            tables larger than this memory. None takes ``["gpu"]`` if strategy ``local`` or ``synchronous`` trains on GPUs,
            without ``arena`` and ``shards``; otherwise ``["dram"]``.
        hot_rows: number of rows of all tables, in all processes, whose values stay in the upper tier. With three tiers, a
            list of two numbers.
        flush_every_steps: number of steps after which hot rows are chosen again, by the number of reads of each row.
        warm_up_steps: number of steps before hot rows are chosen for the first time.
        ssd_dir: a directory on the SSD; None takes ``tiers/`` in the run directory. Its files have no names, and end
            with their process.

    Examples:
        A million rows stay in memory. The others are on an SSD.

        >>> import girih
        >>> store = girih.StoreOptions(
        ...     tiers=["dram", "ssd"], hot_rows=1_000_000, ssd_dir="/mnt/ssd"
        ... )
        >>> store.hot_rows_of, store.is_tiered
        ({'dram': 1000000}, True)
    """

    owner = "store: "

    shards: Annotated[int, Bounds(1, 256)] | None = None
    arena: Literal["heap", "file", "shared"] | None = None
    directory: str | None = None
    reserve_rows: Count | None = None
    tiers: tuple[Literal["gpu", "dram", "ssd"], ...] | None = None
    hot_rows: HotRows | tuple[HotRows, ...] | None = None
    flush_every_steps: Count = 100
    warm_up_steps: Annotated[int, Bounds(0)] = 100
    ssd_dir: str | None = None

    def _check(self) -> None:
        self._check_tiers()
        if (self.arena == "file") != (self.directory is not None):
            raise ConfigError("store: arena = 'file' and directory belong together; give both or neither")

    @property
    def on_gpu(self) -> bool:
        """True if rows are in GPU memory, all or the hottest."""
        return self.tiers is not None and self.tiers[0] == "gpu"

    @property
    def on_ssd(self) -> bool:
        """True if the lowest tier of values is an SSD."""
        return self.tiers is not None and self.tiers[-1] == "ssd"

    @property
    def device(self) -> str | None:
        """The device of rows, "cpu" or "gpu", as in a plan; None lets the plan decide."""
        if self.tiers is None and self.arena is None and self.shards is None:
            return None
        return "gpu" if self.on_gpu else "cpu"

    @property
    def is_tiered(self) -> bool:
        """True if values of rows have several tiers."""
        return self.tiers is not None and len(self.tiers) > 1

    @property
    def hot_rows_of(self) -> dict[str, int]:
        """Tier → number of its hot rows, without the last tier."""
        numbers = self.hot_rows if isinstance(self.hot_rows, tuple) else (self.hot_rows or 0,)
        return dict(zip((self.tiers or ())[:-1], numbers, strict=False))

    @property
    def why_not_kept(self) -> str:
        """The reason why rows end with an embedding server's process, and the option to change; "" if they outlive it."""
        if self.is_tiered:
            return f"its rows ended with it, as store.tiers = {list(self.tiers or ())}: only tiers = ['dram'] is kept"
        if self.arena not in (None, "shared"):
            return f"its rows ended with it, as store.arena = {self.arena!r}: only arena = 'shared' is kept"
        return ""

    @property
    def why_not_numbered(self) -> str:
        """The reason why rows cannot recognize a resent push, and the option to change; "" if they can."""
        if self.is_tiered or self.on_gpu:
            return f"pushes that come again are told apart by rows in one memory of the host, not with store.tiers = {list(self.tiers or ())}"
        return ""

    def moved_to(self, device: Literal["gpu"]) -> StoreOptions:
        """Returns these options, with rows in the memory of a device."""
        return replace(self, tiers=(device,))

    def within(self, run: Path | None) -> StoreOptions:
        """Returns these options, with a directory in the run directory for an SSD tier that has none."""
        if not self.on_ssd or self.ssd_dir is not None or run is None:
            return self
        return replace(self, ssd_dir=str(run / TIERS))

    def _check_tiers(self) -> None:
        if self.tiers is None:
            return
        prefix = f"store: tiers = {list(self.tiers)}: "
        if self.tiers not in TIERS_HELD:
            *known, last = (str(list(held)) for held in TIERS_HELD)
            raise ConfigError(f"{prefix}expected {', '.join(known)} or {last}, hot to cold")
        if self.on_gpu and (self.arena is not None or (self.shards or 1) > 1):
            raise ConfigError(f"{prefix}takes neither arena nor several shards; drop them, or use ['dram']")
        if self.is_tiered and self.hot_rows is None:
            raise ConfigError(f"{prefix}hot_rows is missing: how many rows of all tables stay in memory")
        num_numbers = len(self.hot_rows) if isinstance(self.hot_rows, tuple) else 1
        if self.is_tiered and num_numbers != len(self.tiers) - 1:
            wanted = (
                "a list of two numbers, of rows in GPU memory and in memory"
                if len(self.tiers) > 2
                else "a number"
            )
            raise ConfigError(f"{prefix}hot_rows = {plain(self.hot_rows)}: expected {wanted}")
        if self.is_tiered and self.arena not in (None, "heap"):
            raise ConfigError(
                f"{prefix}needs arena = 'heap', not {self.arena!r}; drop arena, or use tiers = ['dram']"
            )

    def num_shards(self, specs: Iterable[GroupSpec], threads: int | None = None) -> int:
        """Returns the number of shards of all these groups in one process.

        Args:
            specs: the groups.
            threads: number of threads for shards, if ``shards`` is None; None takes the cores of this process.
        """
        if self.on_gpu:
            return 1
        if self.shards is not None:
            return self.shards
        rules = [table.eviction for spec in specs for table in spec.tables]
        if self.reserve_rows is not None or any(rule is not None and rule.max_rows for rule in rules):
            return 1
        return min(threads or len(os.sched_getaffinity(0)), MOST_THREADS)

    def open_store(
        self,
        spec: GroupSpec,
        shard: int,
        num_shards: int,
        segment: str | None,
        hot_share: float = 1.0,
        gpu: int | None = None,
        *,
        attach: bool = False,
    ) -> Store:
        """Opens one shard of a group.

        Args:
            spec: the group.
            shard: number of the shard, from 0.
            num_shards: number of shards of the group in all processes.
            segment: begins the names of shared memory, which the caller removes; None without shared memory.
            hot_share: the group's part of the hot rows, from 0 to 1.
            gpu: see :class:`girih.sparse.spec.SparseSpec`.
            attach: continues with existing shared memory. :attr:`why_not_kept` must be "".

        Raises:
            ConfigError: ``arena = "shared"`` without a process that removes it, or tiers without a directory.
            StorageFullError: there is not enough memory or disk to begin.
        """
        if self.is_tiered:
            heap, share = Heap(reserve_rows=self.reserve_rows), hot_share / num_shards
            below = self._tiers(share) if self.on_ssd else None
            above = self._gpu_tier(share, gpu) if self.on_gpu else None
            return Store(spec, shard=shard, num_shards=num_shards, arena=heap, tiers=below, gpu_tier=above)
        if self.on_gpu:
            there = Gpu(device=gpu, reserve_rows=self.reserve_rows)
            return Store(spec, shard=shard, num_shards=num_shards, arena=there)
        if self.arena == "shared" and segment is None:
            raise ConfigError(
                "store: arena = 'shared': is for embedding servers, as strategy 'hybrid' has them; use 'heap'"
            )
        arena = self._arena(spec, shard, segment, attach=attach)
        store = Store(spec, shard=shard, num_shards=num_shards, arena=arena)
        if isinstance(arena, File):  # the mapping keeps it; a name would outlive a process that is killed
            os.unlink(arena.path)
        return store

    def _tiers(self, hot_share: float) -> Tiers:
        if self.ssd_dir is None:
            raise ConfigError(
                f"store: tiers = {list(self.tiers or ())}: ssd_dir is missing, and there is no run directory to take; give"
                " a directory on the SSD"
            )
        return Tiers(
            directory=self.ssd_dir,
            hot_rows=math.ceil(self.hot_rows_of["dram"] * hot_share),
            flush_every_steps=self.flush_every_steps,
            warm_up_steps=self.warm_up_steps,
        )

    def _gpu_tier(self, hot_share: float, gpu: int | None) -> GpuTier:
        return GpuTier(
            device=gpu,
            hot_rows=math.ceil(self.hot_rows_of["gpu"] * hot_share),
            flush_every_steps=self.flush_every_steps,
            warm_up_steps=self.warm_up_steps,
        )

    def _arena(
        self, spec: GroupSpec, shard: int, segment: str | None, *, attach: bool
    ) -> Heap | Shared | File:
        if segment is not None and self.arena in (None, "shared"):
            if attach:
                return Shared(segment=f"{segment}-{shard}", attach=True, repair=True)
            return Shared(segment=f"{segment}-{shard}", reserve_rows=self.reserve_rows)
        if self.directory is None:
            return Heap(reserve_rows=self.reserve_rows)
        directory = Path(self.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"store: directory = {self.directory!r}: cannot be used ({error.strerror}); name another"
            raise disk_full(error, directory) or ConfigError(text) from None
        name = f"{spec.name}-{shard:04d}-{os.getpid()}.arena"
        return File(path=str(directory / name), reserve_rows=self.reserve_rows)
