"""The layout of a group's rows and the rules of its tables, as arrays for kernels.

Shapes: T tables, S segments, W columns of a row that training sees, V 32-bit words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from girih import config
from girih.errors import ConfigError
from girih.kernels.cpu import layout
from girih.kernels.cpu.admission import MAX_BLOCK_CELLS
from girih.kernels.cpu.layout import Layout
from girih.kernels.cpu.optimizers import hyper_row, number_of, state_columns
from girih.store.spec import Description, GroupSpec, hash_of
from girih.tables import LFU, LRU, TTL, Constant, Initializer, MinCount, Normal, Probability, Uniform

DTYPES = {"float32": layout.FLOAT32, "bfloat16": layout.BFLOAT16, "float16": layout.FLOAT16}
FORMAT_VERSION = 2
_ADMISSIONS: dict[type, int] = {MinCount: layout.ADMIT_MIN_COUNT, Probability: layout.ADMIT_PROBABILITY}
_EVICTIONS: dict[type, int] = {LRU: layout.EVICT_LRU, LFU: layout.EVICT_LFU, TTL: layout.EVICT_TTL}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of the rows in one shard of a group.

    Attributes:
        num_words: the 32-bit words of a row with meta and padding, V.
        kernel: segments, their optimizers' state and the tables' rules, for kernels.
        num_cells: the bytes of all Bloom filters of this shard.
        first_hyper: float64[S, 8], the hyperparameters that set the initial optimizer state of a new row.
        description: the description that an arena or a snapshot must match, as plain values for JSON.
    """

    num_words: int
    kernel: Layout
    num_cells: int
    first_hyper: NDArray[np.float64]
    description: Description

    @property
    def listed(self) -> NDArray[np.bool_]:
        """bool[T]: True for tables that keep their rows in a list."""
        listed: NDArray[np.bool_] = self.kernel.rules[:, layout.EVICTION] != layout.EVICT_NONE
        return listed

    def cells_of(self, table: int) -> slice:
        """Returns the range of a table's Bloom cells among all cells of this shard."""
        bloom = self.kernel.bloom[table]
        start = int(bloom[layout.CELLS_START])
        return slice(start, start + int(bloom[layout.NUM_BLOCKS] * bloom[layout.BLOCK_CELLS]))


def row_layout(spec: GroupSpec, shard: int, num_shards: int) -> RowLayout:
    """Lays out the rows of one shard of a group.

    Raises:
        ConfigError: the dtype is not supported for rows.
    """
    if spec.dtype not in DTYPES:
        raise ConfigError(f"group {spec.name!r}: dtype = {spec.dtype!r}: expected one of {', '.join(DTYPES)}")
    weight_words = spec.dim if spec.dtype == "float32" else (spec.dim + 1) // 2
    segments = np.zeros((len(spec.segments), layout.SEGMENT_COLUMNS), np.int64)
    first, start = 0, layout.VALUES + weight_words
    for number, segment in enumerate(spec.segments):
        width = sum(n for _, n in state_columns(segment.optimizer, segment.dim))
        segments[number] = first, segment.dim, start, width, number_of(segment.optimizer)
        first, start = first + segment.dim, start + width
    bloom, num_cells = _bloom(spec, shard, num_shards)
    initializers = [[_initializer(i) for i in table.initializers] for table in spec.tables]
    admissions = [table.admission for table in spec.tables]
    seeds = [spec.table_seed(number) for number in range(len(spec.tables))]
    kernel = Layout(
        dtype=DTYPES[spec.dtype],
        segments=segments,
        rules=_rules(spec, num_shards),
        chance=np.array([rule.p if isinstance(rule, Probability) else 1.0 for rule in admissions]),
        bloom=bloom,
        table_seeds=np.array(seeds, np.uint64),
        seeds=np.array([[hash_of(f"{n}/{s.name}") for s in spec.segments] for n in seeds], np.uint64),
        initializers=np.array([[kind for kind, _ in row] for row in initializers], np.int64),
        initializer_options=np.array([[options for _, options in row] for row in initializers], np.float64),
    )
    return RowLayout(
        num_words=start + start % 2,
        kernel=kernel,
        num_cells=num_cells,
        first_hyper=hyper_rows(spec, 1.0, 1),
        description=_describe(spec, shard, num_shards),
    )


def without_values(row_layout: RowLayout, num_words: int) -> RowLayout:
    """Returns a layout without segments, of ``num_words`` words: the meta, and other words that the caller defines."""
    kernel, num_tables = row_layout.kernel, len(row_layout.kernel.rules)
    bare = kernel._replace(
        dtype=layout.FLOAT32,
        segments=kernel.segments[:0].copy(),
        seeds=np.zeros((num_tables, 0), np.uint64),
        initializers=np.zeros((num_tables, 0), np.int64),
        initializer_options=np.zeros((num_tables, 0, 2)),
    )
    return replace(
        row_layout, num_words=num_words, kernel=bare, first_hyper=row_layout.first_hyper[:0].copy()
    )


def hyper_rows(spec: GroupSpec, lr_scale: float, step: int) -> NDArray[np.float64]:
    """Returns the optimizers' numbers for one step, float64[S, 8]."""
    return np.array([hyper_row(segment.optimizer, lr_scale, step) for segment in spec.segments])


def _describe(spec: GroupSpec, shard: int, num_shards: int) -> Description:
    return {
        "version": FORMAT_VERSION,
        "group": spec.name,
        "dtype": spec.dtype,
        "dim": spec.dim,
        "segments": [
            {
                "name": segment.name,
                "dim": segment.dim,
                "optimizer": config.plain(segment.optimizer),
                "state": [[name, width] for name, width in state_columns(segment.optimizer, segment.dim)],
            }
            for segment in spec.segments
        ],
        "tables": [
            {"name": t.name, "admission": config.plain(t.admission), "eviction": config.plain(t.eviction)}
            for t in spec.tables
        ],
        "seed": spec.seed,
        "shard": shard,
        "num_shards": num_shards,
    }


def without_hyperparameters(description: Description) -> dict[str, object]:
    """Returns a description without the hyperparameters of optimizers.

    Existing memory must match this part. Hyperparameters may change between runs.
    """
    segments = [{**s, "optimizer": s["optimizer"]["name"]} for s in description["segments"]]
    return {**description, "segments": segments}


def block_range(total_blocks: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Returns the first Bloom block for keys of a shard, and the number of its blocks."""
    first_hash = -(-(shard << 32) // num_shards)
    last_hash = -(-((shard + 1) << 32) // num_shards) - 1
    first, last = (first_hash * total_blocks) >> 32, (last_hash * total_blocks) >> 32
    return first, last - first + 1


def _rules(spec: GroupSpec, num_shards: int) -> NDArray[np.int64]:
    rules = np.zeros((len(spec.tables), layout.RULE_COLUMNS), np.int64)
    for rule, table in zip(rules, spec.tables, strict=True):
        admission, eviction = table.admission, table.eviction
        rule[layout.ADMISSION] = _ADMISSIONS.get(type(admission), layout.ADMIT_ALL)
        rule[layout.EVICTION] = _EVICTIONS.get(type(eviction), layout.EVICT_NONE)
        rule[layout.MAX_ROWS] = layout.UNLIMITED
        if isinstance(admission, MinCount):
            rule[layout.MIN_COUNT] = admission.count
        if isinstance(eviction, TTL):
            rule[layout.TTL] = eviction.steps or eviction.seconds or 0  # it has one of them
            rule[layout.IN_SECONDS] = eviction.seconds is not None
        if eviction is not None and eviction.max_rows is not None:
            rule[layout.MAX_ROWS] = -(-eviction.max_rows // num_shards)
    return rules


def _bloom(spec: GroupSpec, shard: int, num_shards: int) -> tuple[NDArray[np.int64], int]:
    bloom = np.zeros((len(spec.tables), layout.BLOOM_COLUMNS), np.int64)
    start = 0
    for number, table in enumerate(spec.tables):
        if isinstance(table.admission, MinCount):
            total = -(-table.admission.cells // MAX_BLOCK_CELLS)
            block_cells = -(-table.admission.cells // total)
            first, blocks = block_range(total, shard, num_shards)
            bloom[number] = start, first, blocks, total, block_cells
            start += blocks * block_cells
    return bloom, start


def _initializer(initializer: Initializer) -> tuple[int, tuple[float, float]]:
    match initializer:
        case Normal(mean=mean, std=std):
            return layout.INIT_NORMAL, (mean, std)
        case Uniform(low=low, high=high):
            return layout.INIT_UNIFORM, (low, high)
        case Constant(value=value):
            return layout.INIT_CONSTANT, (value, 0.0)
        case _:
            return layout.INIT_ZEROS, (0.0, 0.0)
