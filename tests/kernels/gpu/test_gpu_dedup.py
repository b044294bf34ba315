"""Unique keys, the ids of each, and the cuts of long runs, beside plain twins."""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from girih.kernels.gpu import gradients, jit
from girih.kernels.gpu.dedup import describe_terms, unique
from girih.kernels.gpu.gradients import Pieces
from girih.sparse.groups.gpu_bags import places_and_positions
from girih.store.gpu.gpu_memory import to_device
from gpu_order import ORDERS, take
from reference import dedup

SIZE = 7
GROUP = np.array([3, 0, 2])
"""Features of the group among the batch's four, of which two share a table."""
TABLES = np.array([0, 0, 1], np.int32)


def batch_of(seed, most=4):
    """Ids and bag bounds of four features; the third has no id at all where ``most`` is 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, most + 1, (4, SIZE))
    offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int32)
    ids = rng.choice([-(2**63), -1, 0, 5, 2**40, 2**63 - 1], offsets[-1]).astype(np.int64)
    return ids, offsets, rng.random(len(ids)).astype(np.float32)


def found_in(ids, offsets):
    """Unique keys as the device finds them, and the tensor of places."""
    begins = offsets[GROUP * SIZE].astype(np.int64)
    counts = offsets[(GROUP + 1) * SIZE] - begins
    there = jit.device()
    positions_of = to_device(places_and_positions(begins, counts), there)
    n = int(counts.sum())
    return unique(to_device(ids, there), positions_of, to_device(TABLES, there), n), positions_of, n


@pytest.mark.smoke
@pytest.mark.parametrize("most", [0, 1, 4])
def test_keys_are_numbered_as_they_first_occur(most):
    ids, offsets, _ = batch_of(1, most)
    found, _, n = found_in(ids, offsets)
    keys, counts, inverse = dedup(ids, offsets, SIZE, GROUP, TABLES)
    size = int(found.num_keys)
    assert size == len(keys)
    tables, own = found.tables[:size].tolist(), found.keys[:size].tolist()
    assert list(zip(tables, own, strict=True)) == keys
    assert found.counts[:size].tolist() == counts
    numbers = found.inverse.tolist()
    assert {i: numbers[i] for i in inverse} == inverse
    places = [i for f in GROUP for i in range(offsets[f * SIZE], offsets[(f + 1) * SIZE])]
    assert found.numbers.tolist() == [inverse[i] for i in places]
    assert n == len(places)


@pytest.mark.skipif(not jit.INTERPRETED, reason="a GPU takes an order of its own")
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_of_programs_and_no_old_read_changes_the_numbers_of_keys(order, monkeypatch):
    take(monkeypatch, order, block=8)
    test_keys_are_numbered_as_they_first_occur(4)


@pytest.mark.skipif(not jit.INTERPRETED, reason="counts what the interpreter is asked for")
def test_only_ids_that_read_a_free_slot_swap(monkeypatch):
    take(monkeypatch, "forwards", block=8)
    lanes, swaps = interpreter._interpreter, []
    original = lanes.atomic_cas
    monkeypatch.setattr(
        lanes,
        "atomic_cas",
        lambda *given: (swaps.append((given[1] == 0).sum()), original(*given))[1],
        raising=False,
    )
    there, n = jit.device(), 80
    positions_of = to_device(places_and_positions(np.zeros(1, np.int64), np.array([n])), there)
    found = unique(to_device(np.full(n, 5), there), positions_of, to_device(TABLES[:1], there), n)
    assert (int(found.num_keys), int(found.counts[0])) == (1, n)
    assert sum(swaps) == 8  # the first program's; its lanes read before they swap


@pytest.mark.smoke
@pytest.mark.parametrize("weighted", [False, True])
def test_terms_are_the_ids_of_each_key_in_their_order(weighted):
    ids, offsets, weights = batch_of(2)
    found, positions_of, n = found_in(ids, offsets)
    there, modes = jit.device(), np.array([0, 1, 2], np.int32)
    given = to_device(weights, there) if weighted else None
    first_bags = to_device((GROUP * SIZE).astype(np.int32), there)
    bounds, kinds = to_device(offsets, there), to_device(modes, there)
    terms = describe_terms(found, positions_of, bounds, first_bags, kinds, given, n, SIZE)
    wanted = [[] for _ in range(int(found.num_keys))]
    _, _, inverse = dedup(ids, offsets, SIZE, GROUP, TABLES)
    for slot, feature in enumerate(GROUP):
        for example in range(SIZE):
            begin, end = offsets[feature * SIZE + example : feature * SIZE + example + 2]
            for i in range(begin, end):
                factor = (1.0, 1 / (end - begin), (end - begin) ** -0.5)[modes[slot]]
                wanted[inverse[i]].append((slot, example, i, factor * (weights[i] if weighted else 1.0)))
    starts = terms.starts.tolist()
    for key, own in enumerate(wanted):
        here = slice(starts[key], starts[key + 1])
        columns = terms.features, terms.examples, terms.positions
        mine = list(zip(*(column[here].tolist() for column in columns), strict=True))
        assert mine == [each[:3] for each in own]
        np.testing.assert_allclose(terms.factors[here].cpu(), [each[3] for each in own], rtol=1e-6)


@pytest.mark.smoke
def test_long_runs_are_cut_by_their_length_alone(monkeypatch):
    monkeypatch.setattr(gradients, "LONG", 10)
    counts = [1, 10, 11, 30, 31, 10 * gradients.MOST_PIECES + 1, 0]
    pieces = Pieces(torch.tensor(counts, dtype=torch.int32, device=jit.device()))
    wanted = [0, 0, 2, 3, 4, gradients.MOST_PIECES, 0]
    assert torch.diff(pieces.starts).tolist() == wanted
