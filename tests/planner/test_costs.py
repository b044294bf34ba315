"""Formulas of DES §3.2.3 against values computed by hand; steps of strategies against their bytes and messages."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from girih.errors import ConfigError, MissingFileError
from girih.planner import costs, traffic
from girih.planner.calibration import LINKS, Calibration, Link, Rate, StepWork

# α = 0.1 ms, C = 100 MB/s; N = 4 workers, B = 512 examples of S_f + S_w = 1,000 bytes: 5.12 ms of bytes
LINK = Link(1e-4, 1e8)


@pytest.mark.parametrize(
    ("formula", "synchronous", "by_hand"),
    [
        (costs.parameter_server_s, True, 0.04176),  # 2 · 4 · (0.1 + 5.12) ms
        (costs.parameter_server_s, False, 0.01044),  # 2 · (0.1 + 5.12) ms
    ],
)
def test_weights_that_are_fetched_take_what_the_paper_says(formula, synchronous, by_hand):
    assert formula(512, 1000, 4, LINK, synchronous=synchronous) == pytest.approx(by_hand)


def test_rings_take_what_the_paper_says():
    assert costs.ring_s(4e6, 4, LINK) == pytest.approx(0.0606)  # 2 · 3 · (0.1 + 4 MB / 400 MB/s) ms
    assert costs.ring_s(4e6, 1, LINK) == 0
    assert costs.des_s([4e6, 4e5], 4, LINK) == pytest.approx(0.0606 + 0.0066)
    assert costs.half_ring_s(4e6, 4, LINK) == pytest.approx(0.0303)
    assert costs.one_way_s(1e6, LINK) == pytest.approx(0.0101)


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("name", LINKS)
def test_a_fit_finds_latency_and_bandwidth_in_noise_and_with_a_point_far_off(name, num_workers):
    true = Link(80e-6, 1.5e9)
    factors = np.exp(np.random.default_rng(1).normal(0, 0.05, 9))
    factors[3] = 12.0  # something else had the core
    sizes = [128 * 4**power for power in range(9)]
    points = [
        (size, costs.link_s(name, size, num_workers, true) * float(f))
        for size, f in zip(sizes, factors, strict=True)
    ]
    found = costs.fit(name, points, num_workers)
    assert found.latency_s == pytest.approx(true.latency_s, rel=0.15)
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.15)
    assert found.points == tuple(points)


def test_a_fit_is_a_link_whatever_was_measured():
    for seconds in ([3e-3, 2e-3, 1e-3], [1e-3, 1e-3, 1e-3], [1e-6, 1e-4, 1e-1]):
        found = costs.fit("tcp", list(zip([100, 200, 400], seconds, strict=True)), 2)
        assert found.latency_s >= 0
        assert 0 < found.bytes_per_s < math.inf


def links_of(latency_s, bytes_per_s):
    return dict.fromkeys(LINKS, Link(latency_s, bytes_per_s))


BYTES, MESSAGES = links_of(0.0, 1.0), links_of(1.0, math.inf)  # a second a byte, a second a message
VOTES = 200  # bytes by which trainers agree, which traffic leaves out


def test_a_synchronous_step_moves_its_bytes_in_an_exchange_for_each_set_of_groups():
    sent = traffic.synchronous(4, keys=1000, numbers=17_000, parameters=600_000)
    found = costs.synchronous_step(sent, 4, BYTES, num_sets=2)
    for kind, seconds in found.items():
        assert seconds == pytest.approx(getattr(sent, kind), abs=VOTES)
    # 2 AllToAlls of keys, one for each set's rows and gradients, a small AllReduce; 3 buckets of 1 MiB, and the vote
    found = costs.synchronous_step(sent, 4, MESSAGES, num_sets=2)
    assert found == {"ids": 6, "embeddings": 6, "gradients": 6 + 6, "dense": 18 + 6}
    found = costs.synchronous_step(sent, 4, MESSAGES, num_sets=2, micro_batches=3)
    assert (found["embeddings"], found["gradients"]) == (18, 6 + 6)
    bare = traffic.synchronous(4, keys=1000, numbers=17_000, parameters=0)
    assert costs.synchronous_step(bare, 4, MESSAGES, num_sets=2)["dense"] == 6  # the vote
    none = traffic.synchronous(1, keys=1000, numbers=17_000, parameters=600)
    assert sum(costs.synchronous_step(none, 1, MESSAGES, num_sets=2).values()) == 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_substituted_step_moves_its_bytes(split, half):
    sizes = traffic.PartialSizes(
        summed=70, concatenated=(8, 16), shared_parameters=5000, split=split, partial_bytes=2 if half else 4
    )
    sent = traffic.substitution(100, 4, sizes)
    found = costs.substitution_step(100, 4, BYTES, sizes)
    for kind, seconds in found.items():
        assert seconds == pytest.approx(getattr(sent, kind), abs=VOTES)
    found = costs.substitution_step(100, 4, MESSAGES, sizes)
    votes = split or half  # gradients and the vote in one; the vote alone
    assert found == {"partials": 6 + (12 if split else 6), "dense": 6 * votes}


def test_a_replicated_step_is_the_papers_sum_of_rings():
    links = {**links_of(1.0, 1.0), "all_reduce": LINK}
    sizes = traffic.PartialSizes(summed=400, shared_parameters=5000)
    found = costs.substitution_step(2500, 4, links, sizes)
    assert found["partials"] == pytest.approx(0.0606)  # 4 MB, as above
    assert found["dense"] == 0


@pytest.mark.parametrize(("in_step", "dense_messages"), [(True, 12), (False, 2)])
def test_a_step_with_servers_moves_its_bytes_by_its_transport(in_step, dense_messages):
    share = {"ids": 100, "keys": 40, "numbers": 200, "vectors": 30, "outputs": 120, "parameters": 300}
    sent = traffic.remote(4, **share, in_step=in_step)
    found = costs.remote_step(sent, 4, BYTES, transport="tcp", in_step=in_step)
    for kind, seconds in found.items():
        assert seconds == pytest.approx(getattr(sent, kind), abs=VOTES)
    found = costs.remote_step(sent, 4, MESSAGES, transport="tcp", in_step=in_step)
    assert found == {"ids": 3, "embeddings": 2, "gradients": 4, "dense": dense_messages}
    other = {**MESSAGES, "tcp": Link(7.0, 1.0)}
    assert costs.remote_step(sent, 4, other, transport="shared", in_step=in_step) == found
    alone = traffic.remote(1, **share, in_step=in_step)
    assert costs.remote_step(alone, 1, MESSAGES, transport="tcp", in_step=in_step)["dense"] == 0


def calibration(**changed):
    links = {name: Link(1e-4, 1e9, ((128, 1e-4), (512, 1.5e-4))) for name in LINKS}
    return Calibration(**({"trainers": 2, "machine": {"cores": 2}, "links": links} | changed))


@pytest.fixture
def written(tmp_path):
    """A function that writes a calibration with some keys changed, and returns its path."""

    def write(**changed):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(calibration().to_dict() | changed))
        return path

    return write


def test_a_calibration_is_read_as_it_was_written(written):
    assert Calibration.read(written()) == calibration()
    work = StepWork(
        lookup=Rate(1e-4, 1e-7, 1e-9),
        updates={"adam": Rate(2e-4, 0.0, 0.0)},
        example_s=1e-6,
        value_s=1e-8,
        step_s=1e-3,
        products=((64, 1e9), (256, 3e9), (1024, 2e9)),
    )
    assert Calibration.read(written(work=asdict(work))) == calibration(work=work)
    assert work.flops_per_s == 2e9
    assert work.lookup.seconds(1000, 16, calls=2) == pytest.approx(2e-4 + 1e-4 + 1.6e-5)


def test_a_slower_network_caps_links_and_nothing_else():
    capped = calibration().over(2e8)
    assert {link.bytes_per_s for link in capped.links.values()} == {2e8}
    assert {link.latency_s for link in capped.links.values()} == {1e-4}
    assert calibration().over(1e12) == calibration()


@pytest.mark.parametrize("name", LINKS)
def test_processor_time_of_a_link_is_per_message_and_per_byte(name):
    """10 µs a message and 2 ns a byte, over all that send."""
    measured = []
    for size in (1000, 100_000, 1_000_000):
        messages, sent = costs.sent_by_all(name, size, 3)
        measured.append((size, messages * 1e-5 + sent * 2e-9))
    found = costs.with_cpu(name, LINK, measured, 3)
    assert found.message_cpu_s == pytest.approx(1e-5)
    assert found.byte_cpu_s == pytest.approx(2e-9)
    assert found.cpu_s(10, 1e6) == pytest.approx(2.1e-3)
    assert costs.sent_by_all("all_reduce", 900, 3) == (
        12,
        3600,
    )  # a ring: 3 workers send 2 · 2 parts of 300 bytes
    assert costs.sent_by_all("all_to_all", 900, 3) == (6, 1800)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"version": 1}, "version = 1: expected 3; measure again with girih calibrate"),
        ({"trainers": 1}, "trainers = 1: expected an integer from 2 to 1024"),
        ({"backend": "nccl"}, "expected one of 'gloo'"),
        ({"more": 1}, "unknown key 'more'"),
        ({"links": {"tcp": {"latency_s": 1e-4, "bytes_per_s": 1e9}}}, "links = .'tcp'.: expected"),
        ({"links": {"tcp": {"latency_s": -1.0, "bytes_per_s": 1e9}}}, "latency_s = -1.0: expected a finite"),
        ({"links": {"tcp": {"latency_s": 0.0, "bytes_per_s": 0}}}, "bytes_per_s = 0: expected a finite"),
        ({"links": {"tcp": {"latency_s": math.nan, "bytes_per_s": 1.0}}}, "the number NaN is not finite"),
        ({"links": {"tcp": {"latency_s": 0.0}}}, "'bytes_per_s' is missing"),
    ],
)
def test_another_calibration_is_refused(written, changed, told):
    with pytest.raises(ConfigError, match=told):
        Calibration.read(written(**changed))


def test_what_is_no_calibration_is_refused(tmp_path):
    file = tmp_path / "calibration.json"
    with pytest.raises(MissingFileError, match="no such file; girih calibrate writes one"):
        Calibration.read(file)
    for text, told in (("{", "not JSON"), ("[1]", "version = None: expected 3")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            Calibration.read(file)
