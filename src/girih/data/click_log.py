"""An endless synthetic click log with known click probabilities, and so with a known best AUC.

Row r depends only on (seed, r). So the rows can be computed in any pieces, in any order.

    logit = bias + Σ_f a_f·w(id_f) + b·s·⟨p(user), q(item)⟩ + c·s·⟨p(user), mean q(tags)⟩
                 + d·s·⟨p(context), q(item)⟩ + Σ_x e_x·z_x

The latent vectors p and q and the weights w are hashes of the id. The factor s reduces the effect of rare ids, which no
model could learn. z_x is the numeric feature, standardized, and 0 if the feature is null.

Shapes: R rows, K latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.config import build
from girih.config.bounds import Count, Positive
from girih.data.batch import offsets_of
from girih.errors import ConfigError
from girih.kernels.cpu.arrays import F64, I64, U64
from girih.schema import Categorical, Feature, Numeric, Schema

LATENT_DIM = 4
NUM_CONTEXTS = 48
NUM_TAGS = 400
MAX_TAGS = 5
NULL_SHARE = 0.05
_SCALE = np.sqrt(12.0)  # scales a uniform number to variance 1


def click_log(
    num_examples: int,
    *,
    num_features: int = 3,
    cardinality: int = 100_000,
    zipf: float = 1.3,
    num_numeric: int = 2,
    seed: int = 0,
    start: int = 0,
) -> tuple[pa.Table, F64]:
    """Makes rows ``start`` to ``start + num_examples`` of the log.

    Args:
        num_features: scalar categorical features: ``user``, ``item``, ``context``, then ``f3``, ``f4``, …
        cardinality: number of users, and of values of ``f3``, …; there are a quarter as many items.
        zipf: exponent of the frequencies of ids; with a larger exponent, fewer ids get more of the rows.
        num_numeric: numeric features ``x0`` (log-normal), ``x1`` (normal), and so on in turn; some are null.
        seed: the seed of the whole log and of its model.

    Returns:
        A ``pyarrow.Table`` with these columns, ``tags`` (a list, some null) and ``click``. Also the probabilities that
        the clicks were drawn from, float64[R]: their AUC on ``click`` is the ceiling.

    Raises:
        ConfigError: an invalid argument.
    """
    build(Count, num_examples, "num_examples")
    build(Count, cardinality, "cardinality")
    if num_features < 3 or num_numeric < 0 or start < 0:
        raise ConfigError(
            f"click_log: num_features = {num_features}, num_numeric = {num_numeric}, start = {start}:"
            " expected at least 3, 0 and 0"
        )
    build(Positive, zipf, "click_log: zipf")
    log = _Draws(seed, np.arange(start, start + num_examples, dtype=np.uint64))
    columns: dict[str, Any] = {}
    user = log.ranks("user", cardinality, zipf)
    item = log.ranks("item", max(1, cardinality // 4), zipf)
    context = (log.uniform("context") * NUM_CONTEXTS).astype(np.int64)
    columns["user"] = log.ids("user", user)
    columns["item"] = log.ids("item", item)
    columns["context"] = pa.array(_CONTEXTS).take(pa.array(context))
    logit = -1.6 + 0.7 * log.effect("user", user) + 0.9 * log.effect("item", item)
    logit += 0.4 * log.traits("w/context", context)
    for place in range(3, num_features):
        rank = log.ranks(f"f{place}", cardinality, zipf)
        columns[f"f{place}"] = log.ids(f"f{place}", rank)
        logit += 0.3 * log.effect(f"f{place}", rank)
    tags, tag_vectors = log.tags(item)
    columns["tags"] = tags
    users, items = log.latent("user", user), log.latent("item", item)
    logit += 1.2 * _rarity(user) * _rarity(item) * _dot(users, items)
    logit += 0.9 * _rarity(user) * _dot(users, tag_vectors)
    logit += 0.6 * _rarity(item) * _dot(log.latent("context", context), items)
    for place in range(num_numeric):
        columns[f"x{place}"], standardized = log.numeric(f"x{place}", lognormal=place % 2 == 0)
        logit += (0.5 if place < 2 else 0.1) * standardized
    probabilities: F64 = 1.0 / (1.0 + np.exp(-logit))
    columns["click"] = (log.uniform("click") < probabilities).astype(np.int8)
    return pa.table(columns), probabilities


def click_log_schema(*, num_features: int = 3, num_numeric: int = 2, dim: int = 16) -> Schema:
    """Returns the schema of :func:`click_log`, with label ``click``."""
    names = ["user", "item", "context", *(f"f{place}" for place in range(3, num_features)), "tags"]
    features: list[Feature] = [Categorical(name=name, dim=dim) for name in names]
    for place in range(num_numeric):
        features.append(
            Numeric(name=f"x{place}", transform=("log1p", "standardize") if place % 2 == 0 else "standardize")
        )
    return Schema(features, "click")


_CONTEXTS = [
    f"{device}/{place}/{hour}"
    for device in ("phone", "tablet", "desktop", "tv")
    for place in ("home", "work", "street")
    for hour in ("morning", "noon", "evening", "night")
]


@dataclass(frozen=True, slots=True)
class _Draws:
    """Random numbers for some rows: hashes of (seed, purpose, row or id)."""

    seed: int
    rows: U64

    def traits(self, purpose: str, keys: NDArray[Any]) -> F64:
        """Returns float64[R] of mean 0 and variance 1, equal for equal keys."""
        return np.asarray((_unit(self._hash(purpose, keys)) - 0.5) * _SCALE)

    def uniform(self, purpose: str) -> F64:
        """Returns float64[R] in (0, 1), one per row."""
        return _unit(self._hash(purpose, self.rows))

    def normal(self, purpose: str) -> F64:
        """Returns float64[R], standard normal, one per row (Box & Muller 1958)."""
        radius = np.sqrt(-2.0 * np.log(self.uniform(f"{purpose}/radius")))
        return np.asarray(radius * np.cos(2.0 * np.pi * self.uniform(f"{purpose}/angle")))

    def ranks(self, purpose: str, size: int, exponent: float) -> I64:
        """Returns int64[R] in [0, size), 0 is the most frequent. Inverts the distribution of a bounded power law."""
        u, bound = self.uniform(f"rank/{purpose}"), float(size + 1)
        if abs(exponent - 1.0) < 1e-9:
            position = bound**u
        else:
            position = (1.0 + u * (bound ** (1.0 - exponent) - 1.0)) ** (1.0 / (1.0 - exponent))
        return np.minimum(position.astype(np.int64) - 1, size - 1)

    def ids(self, purpose: str, ranks: I64) -> I64:
        """Returns int64[R], scattered over all 64 bits like hashed ids."""
        return self._hash(f"id/{purpose}", ranks).view(np.int64)

    def effect(self, purpose: str, ranks: I64) -> F64:
        """Returns float64[R], the first-order weight of each id."""
        return _rarity(ranks) * self.traits(f"w/{purpose}", ranks)

    def latent(self, purpose: str, keys: I64) -> F64:
        """Returns float64[K, R], the latent vector of each id."""
        return np.stack([self.traits(f"latent{k}/{purpose}", keys) for k in range(LATENT_DIM)])

    def tags(self, item: I64) -> tuple[pa.Array, F64]:
        """Returns the tags of the rows' items as a list array, and the mean of their vectors, float64[K, R]."""
        lengths = 1 + (self._hash("tags/length", item) % np.uint64(MAX_TAGS)).astype(np.int64)
        lengths[self.uniform("tags/null") < NULL_SHARE] = 0
        offsets = offsets_of(lengths, np.int32)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        draws = _unit(self._hash("tags/which", np.repeat(item, lengths) * MAX_TAGS + place))
        tags = np.minimum(
            (draws * draws * NUM_TAGS).astype(np.int64), NUM_TAGS - 1
        )  # squared: low ones are common
        vectors = self.latent("tag", np.arange(NUM_TAGS))
        sums = np.zeros((LATENT_DIM, len(item)))
        filled = lengths > 0
        if filled.any():
            sums[:, filled] = np.add.reduceat(vectors[:, tags], offsets[:-1][filled], axis=1)
        array = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tags), mask=pa.array(~filled))
        return array, sums / np.maximum(lengths, 1)

    def numeric(self, purpose: str, *, lognormal: bool) -> tuple[pa.Array, F64]:
        """Returns a column with nulls, and its effect on the logit: float64[R], 0 if null."""
        z = self.normal(purpose)
        missing = self.uniform(f"{purpose}/null") < NULL_SHARE
        values = np.expm1(np.maximum(3.0 + z, 0.0)) if lognormal else 35.0 + 12.0 * z
        return pa.array(values, mask=missing), np.where(missing, 0.0, z)

    def _hash(self, purpose: str, keys: NDArray[Any]) -> U64:
        word = np.frombuffer(f"{self.seed}/{purpose}".encode().ljust(8, b"\0"), dtype=np.uint8).astype(
            np.uint64
        )
        salt = np.zeros(1, dtype=np.uint64)
        for byte in word:
            salt = _mixed((salt << np.uint64(8)) ^ salt ^ byte)
        return _mixed(_mixed(keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) ^ salt)


def _unit(bits: U64) -> F64:
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _rarity(ranks: I64) -> F64:
    """Returns the factor s. It is 1 for frequent ids, and falls with the root of the rank."""
    return np.asarray(1.0 / np.sqrt(1.0 + ranks / 50.0))


def _dot(left: F64, right: F64) -> F64:
    return np.asarray((left * right).sum(axis=0) / np.sqrt(LATENT_DIM))


def _mixed(state: U64) -> U64:
    """Applies the finalizer of splitmix64, element by element."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
