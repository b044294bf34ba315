"""Data on which conformance suites train: three features, two tables, a few batches.

Shapes: B examples, D width of an embedding, L ids of a sequence feature in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

import girih
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec

DIM = 4
IDS = 12
"""Ids of every table, from 0 on."""
FEATURES = ("user", "item", "history")
NEEDS = {
    "user": frozenset({"embedding", "first_order"}),
    "item": frozenset({"embedding"}),
    "history": frozenset({"embedding", "sequence"}),
}


def schema() -> girih.Schema:
    """``user``, ``item``, and ``history``, a sequence of items."""
    return girih.Schema(
        [
            girih.Categorical(name="user", dim=DIM),
            girih.Categorical(name="item", dim=DIM),
            girih.Sequence(name="history", table="item", pooling="mean"),
        ],
        labels="click",
    )


def spec(*, shards: int = 1, seed: int = 0, store: StoreOptions | None = None) -> SparseSpec:
    """Tables that Adagrad moves, so that the order of updates shows."""
    return SparseSpec(
        schema=schema(),
        needs=NEEDS,
        optimizer=girih.optim.Adagrad(lr=0.5),
        store=store or StoreOptions(shards=shards),
        seed=seed,
    )


def batch_of(
    users: Sequence[int], items: Sequence[int], histories: Sequence[Sequence[int]] | None = None
) -> Batch:
    """A batch with alternating labels; histories are of the users' ids where they are not given."""
    histories = [[user] for user in users] if histories is None else histories
    lengths = [1] * (2 * len(users)) + [len(history) for history in histories]
    ids = [*users, *items, *(each for history in histories for each in history)]
    return Batch(
        ids=np.array(ids, np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        numeric=np.empty((len(users), 0), np.float32),
        labels=(np.arange(len(users)) % 2).astype(np.float32)[:, None],
    )


def batches() -> tuple[Batch, Batch]:
    """Two batches with ids in common, within each and between them; one history is empty."""
    one = batch_of([1, 2, 1, 3, 5], [7, 7, 8, 1, 2], [[1, 2], [], [2, 2, 3], [7], [4, 1]])
    two = batch_of([2, 1, 4], [8, 2, 7], [[7, 8, 9], [2], [1, 1]])
    return one, two


def probe() -> Batch:
    """Every id of every table once."""
    return batch_of(range(IDS), range(IDS))


def coefficients(batch: Batch, seed: int) -> dict[str, NDArray[np.float32]]:
    """The gradient that every number of a batch's embeddings is to get, by feature: float32[B, D] and the like."""
    rng, size = np.random.default_rng(seed), batch.num_examples
    shapes = dict.fromkeys(FEATURES, (size, DIM))
    shapes |= {"first_order": (size, 1), "sequence": (int(batch.offsets[-1] - batch.offsets[2 * size]), DIM)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def give(
    embeddings: Embeddings,
    wanted: Mapping[str, NDArray[np.float32]],
    batch: Batch,
    examples: slice | None = None,
) -> None:
    """Has embeddings collect the gradients ``wanted``; those of a micro-batch where ``examples`` says so."""
    size = batch.num_examples
    first, behind, _ = (examples or slice(None)).indices(size)
    bounds = batch.offsets[2 * size :] - batch.offsets[2 * size]
    rows = slice(int(bounds[first]), int(bounds[behind]))
    device = embeddings[FEATURES[0]].device
    there = {name: torch.from_numpy(numbers).to(device) for name, numbers in wanted.items()}
    total = torch.zeros((), device=device)
    for name in FEATURES:
        total = total + (embeddings[name] * there[name][first:behind]).sum()
    for block in embeddings.first_order:
        total = total + (block.values[:, 0] * there["first_order"][first:behind]).sum()
    for sequence in embeddings.sequences.values():
        total = total + (sequence.values * there["sequence"][rows]).sum()
    total.backward()  # type: ignore[no-untyped-call]


def numbers_of(embeddings: Embeddings) -> dict[str, NDArray[np.float32]]:
    """Copies of all that embeddings hold, by feature."""
    found = {name: embeddings[name].detach().cpu().numpy().copy() for name in FEATURES}
    for block in embeddings.first_order:
        found["first_order"] = block.values[:, 0].detach().cpu().numpy().copy()
    for sequence in embeddings.sequences.values():
        found["sequence"] = sequence.values.detach().cpu().numpy().copy()
    return found


def refusal(call: Callable[[], object]) -> NonFiniteError:
    """The refusal that a call raises."""
    try:
        call()
    except NonFiniteError as error:
        return error
    raise AssertionError("nothing was refused")
