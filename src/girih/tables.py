"""Specification of tables: initial values, admission of new keys, eviction of old rows. Frozen, pure.

Examples:
    >>> import girih
    >>> table = girih.Table(
    ...     name="user",
    ...     initializer=girih.tables.Uniform(low=-0.05, high=0.05),
    ...     admission=girih.tables.MinCount(count=3),
    ...     eviction=girih.tables.LRU(max_rows=10_000_000),
    ... )
    >>> table.eviction
    LRU(max_rows=10000000)
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from girih.config.bounds import Bounds, Finite, NonNegative
from girih.config.options import Options
from girih.errors import ConfigError
from girih.optim import SparseOptimizer

Dim = Annotated[int, Bounds(1, 4096)]
Rows = Annotated[int, Bounds(1, (1 << 62) - 1)]


class _Rule(Options):
    owner = "{self.rules} {self.name}: "
    rules: ClassVar[str]
    name: ClassVar[str]


class _Initializer(_Rule):
    rules = "initializer"


class _Admission(_Rule):
    rules = "admission"


class _Eviction(_Rule):
    rules = "eviction"


class Normal(_Initializer):
    """Initial values are normally distributed.

    Attributes:
        mean: mean of the values.
        std: standard deviation of the values, at least 0.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", initializer=girih.tables.Normal(std=0.05)).initializer
        Normal(mean=0.0, std=0.05)
    """

    name = "normal"
    mean: Finite = 0.0
    std: NonNegative = 0.01


class Uniform(_Initializer):
    """Initial values are uniform in [low, high).

    Attributes:
        low: the lowest value.
        high: the end of the interval, at least ``low``.

    Examples:
        >>> import girih
        >>> girih.Table(
        ...     name="user", initializer=girih.tables.Uniform(low=-0.05, high=0.05)
        ... ).initializer
        Uniform(low=-0.05, high=0.05)
    """

    name = "uniform"
    low: Finite = -0.01
    high: Finite = 0.01

    def _check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"initializer uniform: low = {self.low!r} is above high = {self.high!r}")


class Zeros(_Initializer):
    """Initial values are zero.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", initializer=girih.tables.Zeros()).initializer
        Zeros()
    """

    name = "zeros"


class Constant(_Initializer):
    """Initial values are one constant.

    Attributes:
        value: the value of each column.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", initializer=girih.tables.Constant(value=0.1)).initializer
        Constant(value=0.1)
    """

    name = "constant"
    value: Finite = 0.0


class MinCount(_Admission):
    """A key gets a row when it has been seen ``count`` times (counting Bloom filter of ``cells`` 8-bit cells).

    The filter may admit a key early (never late): about ``(1 - exp(-4 keys / cells))⁴`` of the keys.

    Attributes:
        count: number of sightings that admits a key, from 1 to 255.
        cells: number of 8-bit cells of the table's filter, all shards together.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", admission=girih.tables.MinCount(count=3)).admission
        MinCount(count=3, cells=1048576)
    """

    name = "min_count"
    count: Annotated[int, Bounds(1, 255)] = 2
    cells: Annotated[int, Bounds(64, 1 << 32)] = 1 << 20


class Probability(_Admission):
    """A key without a row gets one with probability ``p`` each time it is seen.

    Attributes:
        p: the probability, in (0, 1].

    Examples:
        >>> import girih
        >>> girih.Table(name="user", admission=girih.tables.Probability(p=0.05)).admission
        Probability(p=0.05)
    """

    name = "probability"
    p: Annotated[float, Bounds(0, 1, open_low=True)] = 0.1


class LRU(_Eviction):
    """At ``max_rows``, the least recently used row of the table leaves: exact, per shard.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: limit of the table's rows, at least 1.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", eviction=girih.tables.LRU(max_rows=1_000_000)).eviction
        LRU(max_rows=1000000)
    """

    name = "lru"
    max_rows: Rows


class LFU(_Eviction):
    """At ``max_rows``, the least often used rows leave, a sixteenth of the table at once.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: limit of the table's rows, at least 1.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", eviction=girih.tables.LFU(max_rows=1_000_000)).eviction
        LFU(max_rows=1000000)
    """

    name = "lfu"
    max_rows: Rows


class TTL(_Eviction):
    """A row leaves if it was not used for more than ``steps`` steps, or ``seconds`` seconds.

    With ``max_rows``, the least recently used row leaves when the table is full. ``max_rows`` is divided over the
    shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        steps: training steps that an unused row stays. Give either ``steps`` or ``seconds``.
        seconds: wall-clock seconds that an unused row stays.
        max_rows: limit of the table's rows; None sets no limit.

    Examples:
        >>> import girih
        >>> girih.Table(
        ...     name="user", eviction=girih.tables.TTL(seconds=30 * 24 * 3600)
        ... ).eviction
        TTL(steps=None, seconds=2592000, max_rows=None)
    """

    name = "ttl"
    steps: Rows | None = None
    seconds: Rows | None = None
    max_rows: Rows | None = None

    def _check(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("eviction ttl: expected either steps or seconds")


class Fixed(_Eviction):
    """At ``max_rows``, new keys get no rows. They read their initial value, and their gradients are dropped and
    counted.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: limit of the table's rows, at least 1.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", eviction=girih.tables.Fixed(max_rows=1_000_000)).eviction
        Fixed(max_rows=1000000)
    """

    name = "none"
    max_rows: Rows


Initializer = Normal | Uniform | Zeros | Constant
Admission = MinCount | Probability
Eviction = LRU | LFU | TTL | Fixed
Dtype = Literal["float32", "bfloat16", "float16"]


class Table(Options):
    """Rows that share dim, optimizer, initializer, admission and eviction.

    Attributes:
        name: the name that features give as ``table``. A feature without ``table`` reads the table of its own name.
        dim: width of a row, from 1 to 4096; None takes the dim of the features.
        optimizer: one of ``girih.optim``, for rows and first-order weights; None takes the trainer's optimizers.
        initializer: initial values of rows; None means ``Normal(mean=0.0, std=0.01)``.
        admission: keys that get a row, :class:`girih.tables.MinCount` or :class:`girih.tables.Probability`; None admits
            each key.
        eviction: rows that leave: one of LRU, LFU, TTL and Fixed of ``girih.tables``; None keeps all rows.
        dtype: type of the stored values: "float32", or "bfloat16" or "float16" with half the bytes.

    Examples:
        >>> import girih
        >>> user = girih.Table(
        ...     name="user", dim=16, dtype="bfloat16", optimizer=girih.optim.Adagrad(lr=0.05)
        ... )
        >>> schema = girih.Schema(
        ...     [girih.Categorical(name="user")], labels="clicked", tables=[user]
        ... )
        >>> schema.tables[0].dim
        16
    """

    owner = "table {self.name!r}: "

    name: str
    dim: Dim | None = None
    optimizer: SparseOptimizer | None = None
    initializer: Initializer | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    dtype: Dtype = "float32"

    def _check(self) -> None:
        if not self.name:
            raise ConfigError("table: name = '': expected a non-empty string")
