"""The bottleneck of a run under way: the process that is slow, whatever its role, and by whatever it is; and none where all wait in turn."""

import json
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scenes import write

from girih.report.status import status_of
from girih.telemetry.peer_status import BOTTLENECK

pytestmark = pytest.mark.heavy
LONG = ["train.epochs=1000000", "train.log_every_steps=5", "metrics.port=0"]
SLOW_S = 0.06
WINDOW_S = 8.0
"""Shares are over the last five seconds, which files show up to a second late; and a slow batch may be under way."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bottleneck"), num_examples=1601)


def seen(running):
    """A status after so long that it is of now."""
    time.sleep(WINDOW_S)
    assert running.process.poll() is None, running.process.communicate()
    return status_of(running.run)


def shares(found):
    return {f"{each['role']} {each['index']}": each["busy"] for each in found["processes"]}


def busy_seconds(run):
    """Process → its seconds of work by its metrics, and when it was asked."""
    found = {}
    for file in (run / "targets").glob("*.json"):
        (target,) = json.loads(file.read_text())
        text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics").read().decode()
        for family in text_string_to_metric_families(text):
            if family.name == "girih_busy_seconds":
                title = f"{target['labels']['role']} {target['labels']['index']}"
                found[title] = family.samples[0].value, time.monotonic()
    return found


def test_the_role_that_is_slow(begin, slowing):
    """A slow worker shows as such, and not as a busy loader, whose batches wait for it; a role that sleeps is slow too."""
    running = begin("hybrid", *LONG, "strategy.staleness=0")
    running.until_it_trains()
    for role in ("loader", "embedding-worker", "embedding-server", "trainer"):
        slowing.roles({role: SLOW_S})
        found = seen(running)
        assert found["bottleneck"] is not None, (role, shares(found))
        assert (found["bottleneck"]["role"], found["bottleneck"]["index"]) == (role, 0), shares(found)
        assert found["bottleneck"]["busy"] == max(shares(found).values()) >= BOTTLENECK
        others = [each for each in found["processes"] if each["role"] != role]
        assert all(each["busy"] < BOTTLENECK for each in others), shares(found)

    slowing.roles({"embedding-server": SLOW_S}, spin=True)  # on cores that it shares with the others
    before = seen(running), busy_seconds(running.run)
    after = seen(running), busy_seconds(running.run)
    assert before[0]["bottleneck"]["role"] == after[0]["bottleneck"]["role"] == "embedding-server"
    rates = {
        title: (done - before[1][title][0]) / (at_s - before[1][title][1])
        for title, (done, at_s) in after[1].items()
    }
    assert max(rates, key=rates.get) == "embedding-server 0"
    assert rates == pytest.approx(shares(after[0]), abs=0.25)

    slowing.roles(dict.fromkeys(("loader", "embedding-worker", "embedding-server", "trainer"), SLOW_S / 2))
    found = seen(running)
    assert found["bottleneck"] is None, shares(found)
    assert found["totals"]["samples_per_s"] > 0


def test_a_trainer_that_the_others_wait_for(begin, slowing):
    """Those that wait in a collective do not work, whether it is of keys, rows, gradients or losses."""
    running = begin("synchronous", *LONG, "strategy.trainers=2")
    running.until_it_trains()
    for rank in (1, 0):
        slowing.roles({"trainer": SLOW_S}, rank=str(rank))
        found = seen(running)
        assert found["bottleneck"] is not None, shares(found)
        assert (found["bottleneck"]["role"], found["bottleneck"]["index"]) == ("trainer", rank), shares(found)
        assert shares(found)[f"trainer {1 - rank}"] < BOTTLENECK


def test_a_group_server(begin, slowing):
    running = begin(
        "hierarchical", *LONG, "strategy.servers_per_group=1", "strategy.nets=2", "strategy.tagging=rules"
    )
    running.until_it_trains()
    slowing.roles({"group-server": SLOW_S})
    found = seen(running)
    assert found["bottleneck"] is not None, shares(found)
    assert found["bottleneck"]["role"] == "group-server", shares(found)
    assert shares(found)["trainer 0"] < BOTTLENECK
