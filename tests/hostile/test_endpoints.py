"""Frames that a peer who knows the secret should never send, to every kind of endpoint: what fails changes nothing."""

import os
import random
import resource
import sys

import numpy as np
import pytest
from endpoints import KINDS, opened, told
from frames import any_frame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from girih.comm.rpc import Frame
from girih.comm.rpc.frames import Status
from girih.comm.service import as_text
from girih.hierarchical.averaging import DenseVerb as Dense
from girih.sparse.protocol import SparseVerb

FRAMES = int(os.environ.get("GIRIH_FRAMES", "1_040_000"))
"""Frames for all kinds of endpoints together, as many for each."""
MOST_GROWTH_BYTES = 256 << 20
UNIT = 1 if sys.platform == "darwin" else 1024


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A frame may ask a server to save, wherever it says."""
    monkeypatch.chdir(tmp_path)


def play(endpoint, frames):
    """Sends frames in turn; returns how many failed, none of which changed anything."""
    before, num_failed = endpoint.state(), 0
    for frame in frames:
        answered = endpoint.ask(frame)
        after = endpoint.state()
        if answered is not None and answered[0] == Status.FAILED:
            num_failed += 1
            if endpoint.lasting is not None and told(answered[1]).startswith("NonFiniteError"):
                # a gradient that is not finite ends the run, and goes with what was kept for it
                assert endpoint.lasting(after) == endpoint.lasting(before), (frame, told(answered[1]))
            else:
                assert after == before, (frame, told(answered[1]))
        before = after
    return num_failed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_expected_is_answered(kind, tmp_path):
    endpoint, stack = opened(kind, tmp_path)
    with stack:
        answered = [endpoint.ask(frame) for frame in endpoint.samples]
    assert [each[1] for each in answered if each is not None and each[0] == Status.FAILED] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_changes_nothing(kind, tmp_path):
    @settings(
        deadline=None,
        max_examples=20,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(st.randoms(use_true_random=False), st.integers(0, 4))
    def run(dice, num_expected):
        endpoint, stack = opened(kind, tmp_path)
        with stack:
            play(endpoint, endpoint.samples[:num_expected])
            assert play(endpoint, [any_frame(dice, endpoint.samples) for _ in range(8)]) >= 0

    run()
    endpoint, stack = opened(kind, tmp_path)
    with stack:
        assert play(endpoint, [any_frame(random.Random(n), endpoint.samples) for n in range(200)]) > 10


def test_replicas_that_differ_do_not_meet(tmp_path):
    endpoint, stack = opened("dense-server", tmp_path)
    own, beside = np.ones(5, np.float32), np.zeros(2, np.float32)
    with stack:
        endpoint.ask(Frame(Dense.BEGIN, (0,), (own,)))
        assert endpoint.ask(Frame(Dense.MEET, (0, 0), (own, beside))) is None
        assert play(endpoint, [Frame(Dense.MEET, (1, 0), (own, beside[:1]))]) == 1
        assert play(endpoint, [Frame(Dense.BEGIN, (0,), (own[:4],))]) == 1
        assert endpoint.ask(Frame(Dense.MEET, (1, 0), (own, beside)))[0] == Status.REPLY


@pytest.mark.parametrize(
    "begin",
    [None, [], {}, {"epoch": 0}, {"epoch": True, "position": None}, {"epoch": 0, "position": {"nowhere": 1}}],
)
def test_a_pass_that_begins_nowhere_is_refused(begin, tmp_path):
    endpoint, stack = opened("loader", tmp_path)
    with stack:
        assert play(endpoint, [Frame(SparseVerb.BEGIN, (1, 0), (as_text(begin),))]) == 1
        assert endpoint.ask(endpoint.samples[0])[0] == Status.REPLY


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_frames_end_nothing_change_nothing_and_take_no_memory(kind, tmp_path):
    endpoint, stack = opened(kind, tmp_path)
    dice, num_frames = random.Random(7), -(-FRAMES // len(KINDS))
    with stack:
        play(endpoint, (any_frame(dice, endpoint.samples) for _ in range(2000)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
        num_failed = play(endpoint, (any_frame(dice, endpoint.samples) for _ in range(num_frames)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT - before
    print(
        f"{kind}: {num_frames:,} frames, of which {num_failed:,} failed; {grown >> 20} MiB more at the most"
    )
    assert num_failed > num_frames // 4
    assert grown < MOST_GROWTH_BYTES
