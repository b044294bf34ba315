"""What experiments rest on: results that are kept, rates that are chosen, and time that is divided among phases."""

import json
import subprocess
import sys

import pytest
import tomli_w

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")


def _trail(ends, collectives, spans=(), staleness=()):
    steps = [("apply", end - 0.1, 0.1) for end in ends]
    return {"spans": [*steps, *spans], "collectives": list(collectives), "dense_staleness": list(staleness)}


def test_waiting_for_the_last_is_apart_from_communication():
    import phases

    early = _trail([1, 2, 3], [(0.1, 0.9), (1.1, 1.9), (2.1, 2.9)])
    late = _trail([1, 2, 3], [(0.8, 0.95), (1.2, 1.9), (2.8, 2.9)])
    first, last = phases.divide([early, late], 1.0, 3.0)
    assert first["steps"] == last["steps"] == pytest.approx(2)
    assert first["waiting"] == pytest.approx((0.1 + 0.7) / 2)
    assert first["communication"] == pytest.approx((0.7 + 0.1) / 2)
    assert last["waiting"] == pytest.approx(0)
    assert last["communication"] == pytest.approx((0.7 + 0.1) / 2)
    assert first["step"] == pytest.approx(1)


def test_phases_are_cut_at_the_window_and_shared_among_the_steps_within():
    import phases

    spans = [("read", 0.5, 1.0), ("wait for rows", 3.5, 1.0), ("forward", 2.0, 1.0)]
    trail = _trail([1, 2, 3, 4], [], spans, [(0.5, 9), (1.5, 3), (4.0, 9)])
    (found,) = phases.divide([trail], 1.0, 4.0)
    assert found["steps"] == pytest.approx(3)
    assert found["read"] == pytest.approx(0.5 / 3)
    assert found["wait for rows"] == pytest.approx(0.5 / 3)
    assert "forward" not in found
    assert phases.last_step(trail) == pytest.approx(4)
    assert phases.dense_staleness([trail], 1.0, 4.0) == [3]


def test_all_reduces_that_overlap_count_once():
    import phases

    spans = [("allreduce", 1.2, 0.4), ("allreduce", 1.1, 0.3), ("allreduce", 1.8, 0.1)]
    (found,) = phases.divide([_trail([1, 2], [], spans)], 1.0, 2.0)
    assert found["beside"] == pytest.approx(0.6)


def test_a_result_is_kept_for_its_conditions_and_code(tmp_path):
    from experiments import Results, Run

    kept = Results(tmp_path, parts=("schema.py",))
    run = Run("a/b, c/1", {"data": {}}, {"name": "local"}, {"rate": "1gbit"})
    assert kept.kept(run) is None
    assert kept.keep(run, {"auc": 0.5}, 1.25)["wall_s"] == 1.2
    assert kept.kept(run)["auc"] == 0.5
    assert kept.kept(Run(run.name, run.config, run.strategy, {"rate": "none"})) is None
    assert Results(tmp_path, parts=("tables.py",)).kept(run) is None
    assert Results(tmp_path, parts=("tables.py",), other_code=True).kept(run)["auc"] == 0.5


@pytest.mark.parametrize(
    ("best", "most", "tried"), [(1, 9, [1, 2, 4, 0.5]), (4, 9, [1, 2, 4, 8]), (64, 5, [1, 2, 4, 8, 16])]
)
def test_the_grid_of_rates_grows_while_the_best_is_at_its_end(best, most, tried):
    from experiments import tuned

    seen = []

    def score(factor):
        seen.append(factor)
        return -abs(factor - best)

    assert tuned(score, (1, 2, 4), most) == min(tried, key=lambda factor: abs(factor - best))
    assert seen == tried


def test_an_epoch_repeats_its_distinct_files(tmp_path):
    import pyarrow.parquet as pq
    import wide

    words = {"distinct": 2, "features": 3, "each": 1.6}
    unique = wide.write_epoch(tmp_path / "wide", 64, 5, [64], **words)
    tables = [pq.read_table(file) for file in sorted((tmp_path / "wide").glob("train-*.parquet"))]
    assert [table.num_rows for table in tables] == [64] * 5
    assert tables[0] == tables[2] == tables[4] != tables[1] == tables[3]
    written = (tmp_path / "wide" / "unique.json").stat().st_mtime_ns
    assert wide.write_epoch(tmp_path / "wide", 64, 5, [64], **words) == unique
    assert (tmp_path / "wide" / "unique.json").stat().st_mtime_ns == written
    assert 0 < unique[64] <= 64 * 5


@pytest.mark.heavy
def test_a_mesh_deals_files_out_to_its_trainers(tmp_path):
    import wide

    wide.write_epoch(tmp_path, 64, 4, [], distinct=4, features=4, each=1.6)
    mesh = {"name": f"{bench.FOLDER}/mesh.py:Mesh", "trainers": 2, "loaders": 2, "embedding_workers": 2}
    made = wide.config(tmp_path / "train-*.parquet", 32, {"name": "lr"}, features=4, each=1.6)
    (tmp_path / "config.toml").write_text(tomli_w.dumps({**made, "strategy": mesh}))
    words = [sys.executable, "-m", "girih", "train", tmp_path / "config.toml", "--run", tmp_path / "run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 * 64 // 16  # of each trainer: two of four files, batches of its own
    assert summary["updates_since_read_mean"] > 0
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())
    titles = [e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "process_name"]
    assert {"loader 0", "loader 1", "embedding-server 0"} <= set(titles)
