"""Bytes a trainer sends in a step, by hand."""

import pytest

from girih.planner.traffic import FLOAT32, PartialSizes, Speeds, remote, split_pays, substitution, synchronous


def test_replicated_sends_partial_results_around_a_ring_and_nothing_else():
    found = substitution(100, 4, PartialSizes(summed=10, shared_parameters=10_000))
    assert found.partials == 2 * 3 / 4 * 100 * 10 * 4
    assert found.total == found.partials


def test_split_sends_as_much_of_partial_results_and_dense_gradients_besides():
    whole, split = (
        substitution(100, 4, PartialSizes(summed=10, shared_parameters=500, split=s)) for s in (False, True)
    )
    assert split.partials == whole.partials
    assert split.dense == 2 * 3 / 4 * 500 * 4


def test_vectors_that_are_needed_whole_go_to_everybody_once():
    assert substitution(100, 4, PartialSizes(concatenated=(64,))).partials == 3 / 4 * 100 * 64 * 4
    # split: each to the one that has the example, and its gradient back
    assert (
        substitution(100, 4, PartialSizes(concatenated=(40, 24), split=True)).partials
        == 2 * 3 / 16 * 100 * 64 * 4
    )


def test_half_precision_is_half():
    assert (
        substitution(64, 2, PartialSizes(summed=7, partial_bytes=2)).partials * 2
        == substitution(64, 2, PartialSizes(summed=7)).partials
    )


def test_synchronous_sends_keys_rows_gradients_and_all_dense_gradients():
    found = synchronous(4, keys=1000, numbers=17_000, parameters=300)
    assert (found.ids, found.embeddings, found.gradients) == (9000.0, 51_000.0, 51_000.0)
    assert found.dense == 2 * 3 / 4 * 300 * 4
    assert found.total == pytest.approx(9000 + 102_000 + 1800)
    half = synchronous(4, keys=1000, numbers=17_000, parameters=300, wire={**FLOAT32, "gradients": "float16"})
    assert (half.ids, half.embeddings, half.dense) == (found.ids, found.embeddings, found.dense)
    assert half.gradients == 3 / 4 * (17_000 * 2 + 1000 * 4)


def test_splitting_pays_where_links_are_fast_or_the_network_is_large_for_its_parameters():
    more = {"shared_parameters": 1_000_000, "weights": 1_000_000}
    fast, slow = Speeds(1e9, 1e11), Speeds(1e7, 1e11)
    assert split_pays(4096, 4, speeds=fast, **more)
    assert not split_pays(4096, 4, speeds=slow, **more)
    assert not split_pays(16, 4, speeds=fast, **more)


def test_encodings_change_what_goes_between_worker_and_trainer_alone():
    share = {
        "ids": 100,
        "keys": 40,
        "numbers": 200,
        "vectors": 30,
        "outputs": 120,
        "parameters": 0,
        "in_step": True,
    }
    plain = remote(2, **share)
    assert (plain.ids, plain.embeddings) == (100 * 8 + 40 * 12, (200 + 120) * 4)
    coded = remote(2, **share, wire={**FLOAT32, "compress_ids": True, "gradients": "float16"})
    assert coded.ids == 40 * 8 + 100 * 2 + 40 * 12
    assert coded.embeddings == plain.embeddings
    assert coded.gradients == 200 * 4 + 120 * 2 + 30 * 4
