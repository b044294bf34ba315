"""Options for the storage of rows: ``[store]`` of a config."""

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
        shards: number of parts of every table, by key, from 1 to 4,096. Up to 8 parts have a thread each, and more parts
            share one thread per core. Results do not depend on it, unless a table has ``max_rows``: then each shard
            holds its part of ``max_rows``, rounded up, and evicts rows within that part. None takes the number of torch
            threads in a trainer, and the number of cores elsewhere, at most 8. If ``max_rows`` or ``reserve_rows``
            limits the rows, None takes 1.
        arena: "heap" is private memory. "file" maps files below ``directory``, so that tables may be larger than
            memory. "shared" is shared memory for embedding servers, which survives a killed process. None takes
            "shared" in embedding servers and "heap" elsewhere.
        directory: a directory on the disk that holds the files of arena "file". The files have no names and end with
            the process, because checkpoints keep the rows.
        reserve_rows: limits the rows of a group in one shard; None reserves as many as memory (or disk) could hold.
        tiers: the memories that hold the values of rows, hot to cold: ``["dram"]``, ``["dram", "ssd"]`` for tables
            larger than memory, ``["gpu"]`` for rows in the memory of the trainer's GPU, ``["gpu", "dram"]`` or
            ``["gpu", "dram", "ssd"]`` for tables larger than that memory. None takes ``["gpu"]`` if strategy ``local``
            or ``synchronous`` trains on GPUs and neither arena nor shards are set, and ``["dram"]`` otherwise.
        hot_rows: rows of all tables, in all processes, whose values stay in the upper tier. With three tiers, a list of
            two numbers.
        flush_every_steps: steps between two choices of the hot rows, by how often rows were read.
        warm_up_steps: steps before the first choice.
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

    shards: Annotated[int, Bounds(1, 4096)] | None = None
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
        """True if all rows, or the hottest rows, are in GPU memory."""
        return self.tiers is not None and self.tiers[0] == "gpu"

    @property
    def on_ssd(self) -> bool:
        """True if the lowest tier is an SSD."""
        return self.tiers is not None and self.tiers[-1] == "ssd"

    @property
    def device(self) -> str | None:
        """The device of groups with these options, "cpu" or "gpu", as in a plan. None leaves the choice to the plan."""
        if self.tiers is None and self.arena is None and self.shards is None:
            return None
        return "gpu" if self.on_gpu else "cpu"

    @property
    def is_tiered(self) -> bool:
        """True if there are several tiers."""
        return self.tiers is not None and len(self.tiers) > 1

    @property
    def hot_rows_of(self) -> dict[str, int]:
        """The number of hot rows of every tier except the last."""
        numbers = self.hot_rows if isinstance(self.hot_rows, tuple) else (self.hot_rows or 0,)
        return dict(zip((self.tiers or ())[:-1], numbers, strict=False))

    @property
    def why_not_kept(self) -> str:
        """The reason why rows end with the process of an embedding server. Empty if they survive it.

        The text names the option that would change this.
        """
        if self.is_tiered:
            return f"its rows ended with it, with store.tiers = {list(self.tiers or ())}: only tiers = ['dram'] is kept"
        if self.arena not in (None, "shared"):
            return f"its rows ended with it, with store.arena = {self.arena!r}: only arena = 'shared' is kept"
        return ""

    @property
    def why_not_numbered(self) -> str:
        """The reason why stores cannot recognize a resent push. Empty if they can.

        The text names the option that would change this.
        """
        if self.is_tiered or self.on_gpu:
            return (
                f"resent pushes are recognized only with store.tiers = ['dram'], not {list(self.tiers or ())}"
            )
        return ""

    def moved_to(self, device: Literal["gpu"]) -> StoreOptions:
        """Returns these options with rows in the memory of a device."""
        return replace(self, tiers=(device,))

    def within(self, run: Path | None) -> StoreOptions:
        """Returns these options with ``ssd_dir`` in the run directory, if it is needed and not set."""
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
        """Returns the number of shards that each of these groups has in one process.

        Args:
            threads: the threads for shards, if no option decides their number; None takes the cores of this process.
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
            segment: prefix of the names of shared memory, which the caller removes; None without shared memory.
            hot_share: the group's part of the hot rows.
            gpu: see :class:`girih.sparse.spec.SparseSpec`.
            attach: True continues with existing shared memory. This is possible if :attr:`why_not_kept` is empty.

        Raises:
            ConfigError: ``arena = "shared"`` without ``segment``, or tiers on an SSD without a directory.
            StorageFullError: memory or disk cannot hold an empty shard.
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
                "store: arena = 'shared': works only in embedding servers, for example of strategy 'hybrid'; use 'heap'"
            )
        arena = self._arena(spec, shard, segment, attach=attach)
        store = Store(spec, shard=shard, num_shards=num_shards, arena=arena)
        if isinstance(arena, File):  # the mapping keeps the file, and a name would outlive a killed process
            os.unlink(arena.path)
        return store

    def _tiers(self, hot_share: float) -> Tiers:
        if self.ssd_dir is None:
            raise ConfigError(
                f"store: tiers = {list(self.tiers or ())}: ssd_dir is missing, and there is no run directory to use; set"
                " ssd_dir to a directory on the SSD"
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
