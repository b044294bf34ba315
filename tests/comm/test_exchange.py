"""Exchanges whose sizes follow from counts: real processes, on hosts of different sizes."""

import numpy as np
import pytest
import torch

from companions import together
from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import BetweenHosts, DirectExchange

SIZE, NUM_COUNTS = 5, 2
HOSTS = ("aaabb", "abaab", "abcab", "abbbb")
MOST = (0, 1, 40)


def requests(counts):
    return 1 + counts.sum(axis=-1)


def rows(counts):
    return 3 * counts[..., 1]


def sent_by(rng, sizes, dtype):
    return torch.from_numpy(rng.integers(-(2**62), 2**62, sizes.sum())).to(dtype)


def trips(exchange, rank, most):
    """What comes back and forth: the same requests whatever the exchange."""
    rng = np.random.default_rng((rank, most))
    counts = exchange.send_counts(rng.integers(0, most + 1, (SIZE, NUM_COUNTS)))

    def moved(sizes, dtype):
        return exchange.begin(sent_by(rng, sizes.sent, dtype), sizes)()

    return [
        counts.received.tolist(),
        moved(counts.there(requests), torch.int64).tolist(),
        moved(counts.back(rows), torch.float32).tolist(),
        moved(counts.there(rows), torch.float16).view(torch.int16).tolist(),
    ]


def play(ranks):
    """For each grouping: whether all that comes is what comes directly, and messages between hosts of one exchange."""
    told = []
    for hosts in HOSTS:
        grouped = BetweenHosts(ranks, hosts)
        alike = [
            trips(grouped, ranks.rank, most) == trips(DirectExchange(ranks), ranks.rank, most)
            for most in MOST
        ]
        counts = grouped.send_counts(np.ones((SIZE, NUM_COUNTS), np.int64))
        before = grouped.num_messages
        grouped.begin(torch.arange(3 * SIZE), counts.there(requests))()
        told.append([alike, grouped.num_messages - before])
    apart = TrainerGroup(
        ranks.rank, SIZE, ranks.registry, host=f"127.0.0.{1 + ranks.rank // 3}", name="apart"
    )
    told.append(apart.hosts())
    apart.close()
    return told


@pytest.fixture(scope="module")
def told():
    return together(play, SIZE)


@pytest.mark.parametrize("number", range(len(HOSTS)), ids=HOSTS)
def test_grouped_by_host_it_brings_what_comes_directly_bit_for_bit(told, number):
    assert [each[number][0] for each in told] == [[True] * len(MOST)] * SIZE


@pytest.mark.parametrize("number", range(len(HOSTS)), ids=HOSTS)
def test_a_pair_of_hosts_exchanges_one_message_each_way(told, number):
    num_hosts = len(set(HOSTS[number]))
    assert sum(each[number][1] for each in told) == num_hosts * (num_hosts - 1)


def test_no_rank_is_the_relay_to_all_hosts_where_there_are_ranks_enough(told):
    assert [each[HOSTS.index("abcab")][1] for each in told] == [1, 1, 2, 1, 1]


def test_each_rank_knows_the_hosts_of_all(told):
    assert [each[-1] for each in told] == [["127.0.0.1"] * 3 + ["127.0.0.2"] * 2] * SIZE
