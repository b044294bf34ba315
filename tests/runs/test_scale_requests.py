"""Requests to scale a run, in its directory: one at a time, and each with its outcome."""

import json
import os

import pytest

from girih import cli
from girih.errors import RunDirectoryError
from girih.processes.lease import Lease
from girih.runs import scale_requests
from girih.runs.directory import RunDirectory

GONE = Lease("elsewhere", "", 1, "1", "girih-1.1.1-")


def lease_of(run):
    return Lease.of_run(run / ".lock")


def test_there_is_one_at_a_time(tmp_path):
    first = scale_requests.ask(tmp_path, {"loader": 2})
    with pytest.raises(RunDirectoryError, match="another scaling is under way; wait for it, then ask again"):
        scale_requests.ask(tmp_path, {"loader": 3})
    assert scale_requests.pending(tmp_path) == first
    assert os.listdir(tmp_path) == ["scale.json"]
    scale_requests.refuse(tmp_path, first, "no")
    assert scale_requests.pending(tmp_path) is None
    second = scale_requests.ask(tmp_path, {"loader": 3})
    assert scale_requests.outcome(tmp_path, first) == {"name": first.name, "refused": "no"}
    assert scale_requests.outcome(tmp_path, second) is None


def test_history_tells_what_was_scaled_and_when(tmp_path):
    refused = scale_requests.ask(tmp_path, {"loader": 2})
    scale_requests.refuse(tmp_path, refused, "no")
    begun = scale_requests.begin(tmp_path, scale_requests.ask(tmp_path, {"loader": 3}), 7, {"loader": 1})
    assert scale_requests.pending(tmp_path) == begun
    scale_requests.end(tmp_path, begun)
    with (tmp_path / "scaled.jsonl").open("a") as file:
        file.write('{"name": "cut o')
    (only,) = scale_requests.history(tmp_path)
    assert (only["step"], only["roles"]) == (7, {"loader": [1, 3]})
    assert 0 <= only["paused_s"] <= only["seconds"]
    assert only["at_s"] == pytest.approx(begun.asked_s, abs=60)


def test_what_a_run_left_that_is_over_is_forgotten(tmp_path):
    run = tmp_path / "run"
    with RunDirectory(run):
        own = lease_of(run)
    for lease, stays in ((None, True), (own, True), (GONE, False)):
        begun = scale_requests.begin(run, scale_requests.ask(run, {"loader": 2}), 7, {"loader": 1}, lease)
        with RunDirectory(run, resume=True):
            assert (scale_requests.pending(run) == begun) is stays
        scale_requests.withdraw(run)
    scale_requests.ask(run, {"loader": 2})
    with RunDirectory(run, resume=True):
        assert scale_requests.pending(run) is None


def test_a_damaged_request_is_told(tmp_path):
    (tmp_path / "scale.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"scale.json: damaged: .*; delete it, and ask again"):
        scale_requests.pending(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("embedding-sever=2", "unknown role 'embedding-sever'; did you mean 'embedding-server'?"),
        ("loader=0", "loader=0: expected ROLE=COUNT with at least one process, as loader=4"),
        ("loader=two", "loader=two: expected ROLE=COUNT with at least one process, as loader=4"),
        ("loader", "loader: expected ROLE=COUNT with at least one process, as loader=4"),
        ("loader=2", "this run is not on; train it with --resume, with other counts by --set"),
    ],
)
def test_the_command_refuses(tmp_path, capsys, wanted, why):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    assert cli.run(["scale", str(tmp_path), wanted]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1
    assert not (tmp_path / "scale.json").exists()


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    assert cli.run(["scale", str(tmp_path / "none"), "loader=2"]) == 2
    assert "does not exist; give a run directory" in capsys.readouterr().err
