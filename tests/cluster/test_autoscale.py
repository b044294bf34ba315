"""Numbers of processes that follow how busy these are: what busy shares ask for, and what becomes of it."""

import json
import logging
import os
import socket
import time

import pytest

from girih.cluster.autoscale import HOLD, LOOKS, Autoscaler, Change, decided, out_of_bounds
from girih.cluster.options import ClusterOptions
from girih.config import build
from girih.errors import ConfigError
from girih.runs import scale_requests
from girih.telemetry.peer_status import BOTTLENECK, busy_of
from girih.telemetry.status_file import read_all

COUNTS = {"trainer": 1, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
BOUNDS = {"embedding-server": (1, 2), "embedding-worker": (1, 3)}
CORES = len(os.sched_getaffinity(0))


def change(**busy):
    named = {name.replace("_", "-"): each for name, each in busy.items()}
    found, why = decided(named, COUNTS, BOUNDS)
    assert bool(why) == (found is not None)
    return None if found is None else (found.role, found.after)


def test_the_bottleneck_gets_one_more():
    assert change(embedding_worker=0.9, trainer=0.5) == ("embedding-worker", 3)
    assert change(embedding_server=0.8, embedding_worker=0.7) == ("embedding-server", 2)
    assert change(embedding_worker=BOTTLENECK - 0.01, trainer=0.5) is None
    assert change(embedding_worker=0.9, trainer=0.95) is None  # more of them would wait for the trainer


def test_one_goes_where_the_others_would_have_little_to_do():
    assert change(embedding_worker=0.2, trainer=0.9) == ("embedding-worker", 1)
    assert change(embedding_worker=0.25, trainer=0.9) is None
    assert change(embedding_server=0.0, trainer=0.9) is None  # the floor


@pytest.mark.parametrize("count", range(1, 20))
def test_no_change_asks_for_its_opposite(count):
    """At the busy share that follows from it, where the work stays the same: it goes to others, or comes from those that went."""
    bounds = {"loader": (1, 30)}
    for busy in (BOTTLENECK, 0.8, 1.0):
        more, _ = decided({"loader": busy}, {"loader": count}, bounds)
        assert more == Change("loader", count, count + 1)
        found, _ = decided({"loader": busy * count / more.after}, {"loader": more.after}, bounds)
        assert found is None or found.grows
    fewer, _ = decided({"loader": 0.49 * count / (count + 1)}, {"loader": count + 1}, bounds)
    assert fewer == Change("loader", count + 1, count)
    found, _ = decided({"loader": 0.49}, {"loader": count}, bounds)
    assert found is None or not found.grows


def test_no_role_leaves_its_bounds():
    assert decided({"loader": 1.0}, COUNTS, {"loader": (1, 1)})[0] is None
    assert out_of_bounds(COUNTS, {"loader": (2, 4)})[0] == Change("loader", 1, 2)
    assert out_of_bounds(COUNTS, {"embedding-worker": (1, 1)})[0] == Change("embedding-worker", 2, 1)
    assert out_of_bounds(COUNTS, BOUNDS) is None
    assert decided({}, COUNTS, BOUNDS)[0] is None


def test_what_is_out_of_bounds_is_not_judged(site):
    site.counts = {"loader": 4}
    site.goes_on()
    assert site.window(0.9) == ({"loader": 2}, "cluster.autoscale allows 1 to 2 of it")
    site.done()
    assert [site.window(0.9, rate=1) for _ in range(2 * LOOKS)] == [None] * 2 * LOOKS


def show(run, role, busy, index=0, age_s=0.0, cores=0.0):
    """A process that worked this share of the last five seconds."""
    now, then = time.time() - age_s, time.time() - age_s - 5.0
    readings = {
        name: {
            "at_s": at_s,
            "cpu_s": 5.0 * cores * had,
            "rss_bytes": 0,
            "stats": {"counters": {}, "histograms": {}, "live": {}, "busy_s": 5.0 * busy * had},
        }
        for name, at_s, had in (("now", now, 1.0), ("then", then, 0.0))
    }
    shown = {
        "role": role,
        "index": index,
        "incarnation": 0,
        "pid": 1,
        "start": "",
        "host": socket.gethostname(),
    }
    (run / "live").mkdir(exist_ok=True)
    (run / "live" / f"{role}-{index}.json").write_text(
        json.dumps({**shown, "begun_s": 0.0, "endpoint": "", **readings})
    )


def test_a_role_is_as_busy_as_its_busiest_process_once_all_say_theirs(tmp_path):
    counts = {"trainer": 1, "loader": 2}
    show(tmp_path, "trainer", 0.2)
    show(tmp_path, "loader", 1.0)
    assert busy_of(read_all(tmp_path), counts) == {}
    show(tmp_path, "loader", 0.4, index=1)
    assert busy_of(read_all(tmp_path), counts) == pytest.approx({"trainer": 0.2, "loader": 1.0})
    show(tmp_path, "trainer", 0.2, age_s=6.0)
    assert busy_of(read_all(tmp_path), counts) == {}


class Site:
    """A run of two loaders at most whose autoscaler looks at a window in each step, which takes no time."""

    def __init__(self, run, **options):
        self.run, self.counts, self.examples, self.train_s = run, {"loader": 1}, 0, 0.0
        self.scaler = Autoscaler(run, {"loader": (1, 2)}, every_s=0.0, **options)
        self.scaler.look(self.counts, 0, 0.0)  # it sees the first numbers, and that training is on
        self.scaler.look(self.counts, 0, 0.0)

    def window(self, busy, rate=100, cores=0.0):
        """One window; the request that it led to, if any."""
        for index in range(self.counts["loader"]):
            show(self.run, "loader", busy, index=index, cores=cores)
        self.examples, self.train_s = self.examples + rate, self.train_s + 1.0
        self.scaler.look(self.counts, self.examples, self.train_s)
        found = scale_requests.pending(self.run)
        return None if found is None else (dict(found.counts), found.why)

    def until_asked(self, busy, rate=100, **seen):
        """Windows until there is a request: the last one of so many that agree."""
        assert [self.window(busy, rate, **seen) for _ in range(LOOKS - 1)] == [None] * (LOOKS - 1)
        return self.window(busy, rate, **seen)

    def done(self):
        """Has the request done, and the autoscaler see it."""
        request = scale_requests.pending(self.run)
        scale_requests.end(self.run, scale_requests.begin(self.run, request, 1, self.counts))
        for index in range(max(self.counts["loader"], request.counts["loader"])):
            (self.run / "live" / f"loader-{index}.json").unlink(missing_ok=True)
        self.counts = dict(request.counts)
        self.goes_on()

    def goes_on(self):
        """The autoscaler hears of what was asked for, sees other numbers, and the training behind them."""
        self.scaler._next_s = 0.0
        for _ in range(3):
            self.scaler.look(self.counts, self.examples, self.train_s)
            self.scaler._next_s = 0.0


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_windows_must_agree(site):
    asked = [site.window(busy) for busy in (1.0, 1.0, 0.5, 1.0, 1.0)]
    assert asked == [None] * 5
    assert site.window(1.0) == ({"loader": 2}, "loader works 100% of the time, and is the bottleneck")


def test_a_window_that_trained_little_says_nothing(site):
    site.window(1.0)
    site.window(1.0)
    show(site.run, "loader", 1.0)
    site.scaler.look(site.counts, site.examples, site.train_s)  # it evaluated
    assert site.until_asked(1.0) is not None


def test_a_change_is_kept_where_training_is_faster(site, caplog):
    site.until_asked(1.0, rate=100)
    site.done()
    with caplog.at_level(logging.INFO, logger="girih"):
        assert [site.window(0.8, rate=160) for _ in range(LOOKS)] == [None] * LOOKS
    assert "autoscale keeps loader 1 → 2: 100 → 160 samples/s" in caplog.text
    assert site.until_asked(0.2) == (
        {"loader": 1},
        "loader works 20% of the time; 1 would work less than 50%",
    )


def test_a_change_that_brought_nothing_is_taken_back_and_not_tried_again_soon(site):
    site.until_asked(1.0, rate=100)
    site.done()
    site.scaler._every_s = 1.0  # it holds for some seconds
    site.scaler._next_s = 0.0
    for _ in range(LOOKS):
        asked = site.window(0.9, rate=103)
        site.scaler._next_s = 0.0
    assert asked == ({"loader": 1}, "loader 1 → 2 brought nothing: 100 → 103 samples/s")
    site.done()
    for _ in range(3 * LOOKS):
        assert site.window(1.0, rate=100) is None
        site.scaler._next_s = 0.0
    (until_s,) = site.scaler._blocked_s.values()
    assert until_s - time.monotonic() == pytest.approx(HOLD * 2 * 1.0, abs=5.0)
    site.scaler._every_s, site.scaler._blocked_s = 0.0, {}
    assert site.until_asked(1.0)[0] == {"loader": 2}
    told = [(each["roles"], each["why"]) for each in scale_requests.history(site.run)]
    assert [roles for roles, _ in told] == [{"loader": [1, 2]}, {"loader": [2, 1]}]
    assert all(why for _, why in told)


def test_one_fewer_that_made_training_slower_comes_back(site):
    site.counts = {"loader": 2}
    site.goes_on()
    assert site.until_asked(0.1, rate=100)[0] == {"loader": 1}
    site.done()
    found = [site.window(0.4, rate=89) for _ in range(LOOKS)][-1]
    assert found == ({"loader": 2}, "loader 2 → 1 made training slower: 100 → 89 samples/s")


def test_one_fewer_that_changed_little_stays_away(site, caplog):
    site.counts = {"loader": 2}
    site.goes_on()
    site.until_asked(0.1, rate=100)
    site.done()
    with caplog.at_level(logging.INFO, logger="girih"):
        assert [site.window(0.4, rate=91) for _ in range(LOOKS)] == [None] * LOOKS
    assert "autoscale keeps loader 2 → 1: 100 → 91 samples/s" in caplog.text


def test_no_process_comes_where_no_core_is_left_unless_that_is_said(tmp_path, caplog):
    for name in ("within", "beyond"):
        (tmp_path / name).mkdir()
    within = Site(tmp_path / "within")
    for _ in range(2 * LOOKS):
        assert within.window(1.0, cores=CORES) is None
    (line,) = [each for each in caplog.messages if "leaves out" in each]  # told once
    assert line.startswith(
        "autoscale leaves out loader 1 → 2 (loader works 100% of the time, and is the bottleneck): all cores"
    )
    assert within.until_asked(1.0, cores=CORES - 0.9) is not None
    beyond = Site(tmp_path / "beyond", beyond_cores=True)
    assert beyond.until_asked(1.0, cores=CORES) is not None


def test_what_is_refused_is_told_and_not_asked_for_again(site, caplog):
    site.until_asked(1.0)
    scale_requests.refuse(site.run, scale_requests.pending(site.run), "no room")
    site.goes_on()
    assert "autoscale: loader 1 → 2 is refused: no room" in caplog.text
    site.scaler._blocked_s = {key: time.monotonic() + 60 for key in site.scaler._blocked_s}
    assert [site.window(1.0) for _ in range(2 * LOOKS)] == [None] * 2 * LOOKS


def test_a_user_who_asks_meanwhile_comes_first(site):
    user = scale_requests.ask(site.run, {"loader": 2})
    for _ in range(2 * LOOKS):
        site.window(1.0)
    assert scale_requests.pending(site.run) == user
    site.done()
    assert site.scaler._judged is None  # nobody judges what a user wants
    assert scale_requests.history(site.run)[0]["why"] == ""


def test_options_are_checked():
    options = build(ClusterOptions, {"autoscale": {"loader": [1, 3]}}, "[cluster]")
    assert options.autoscale["loader"] == (1, 3)
    for given, told in (
        (
            {"loader": [3, 2]},
            r"autoscale: loader = \[3, 2\]: expected the fewest and then the most processes",
        ),
        ({"lodaer": [1, 2]}, r"autoscale: unknown role 'lodaer'; did you mean 'loader'\?"),
        ({"loader": [0, 2]}, r"autoscale.loader\[0\] = 0"),
        ({"loader": [1, 2, 3]}, "expected a list of 2"),
        ({"loader": 2}, "expected a list"),
    ):
        with pytest.raises(ConfigError, match=told):
            build(ClusterOptions, {"autoscale": given}, "[cluster]")
