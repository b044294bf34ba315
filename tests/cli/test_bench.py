"""``girih bench``: listed, started, refused; and the benchmarks of this folder run end to end at toy sizes."""

import json
from pathlib import Path

import pytest

from companions import ran
from girih import cli
from girih.cli import bench

TINY = {
    "kernels": (
        "--quick", "--dims", "4", "--rows", "1000", "--batch", "64", "--repeats", "2", "--memory-bytes", "65536",
        "--features", "2", "4", "--threads", "1", "--optimizers", "adagrad",
    ),
    "train": (
        "--models", "deepfm", "--dims", "4", "--bag", "2", "--rows", "100", "--batch", "64", "--rounds", "2",
        "--precision", "float32", "--threads", "1",
    ),
}  # fmt: skip
PEERS = ("fbgemm_gpu", "torchrec", "deepctr_torch")


def test_without_a_name_it_lists_one_line_each(capsys):
    assert cli.run(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {"kernels", "train"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 3 for line in lines)
    assert "harness" not in {line.split()[0] for line in lines}


def test_an_unknown_name_is_told_the_nearest(capsys):
    assert cli.run(["bench", "kernls"]) == 2
    assert capsys.readouterr().err == "girih: bench: unknown benchmark 'kernls'; did you mean 'kernels'?\n"


def test_an_installed_package_has_no_benchmarks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    assert cli.run(["bench", "kernels"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "clone the repository" in told


@pytest.mark.slow
def test_options_are_the_benchmarks_own(tmp_path):
    helped = ran(bench.FOLDER / "train.py", "--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert "--precision" in helped.stdout
    refused = ran(bench.FOLDER / "train.py", "--dimz", "16", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "girih: bench train: unrecognized arguments: --dimz 16; see --help\n"


@pytest.mark.parametrize("name", [pytest.param("kernels", marks=pytest.mark.heavy), "train"])
def test_runs_without_peers_and_says_so(name, tmp_path):
    file = bench.FOLDER / f"{name}.py"
    words = (*TINY[name], "--resume", "--json", "out/found.json")
    done = ran(file, *words, cwd=tmp_path, hidden=PEERS)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert found["benchmark"] == name
    assert found["command"].startswith(f"girih bench {name} ")
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"]
    assert found["not_identical"]
    assert all("make bench-peers" in found["skipped"][peer] for peer in ("fbgemm_gpu", "torchrec"))
    assert "skipped: torchrec: " in done.stdout
    for table in found["tables"]:
        assert table["rows"]
        assert all(set(row) == set(table["columns"]) for row in table["rows"])
    rows = found["tables"][0]["rows"]
    if name == "kernels":
        drop_in = {"girih.nn.EmbeddingBag", "girih.nn.EmbeddingBagCollection"}
        assert {row["what"] for row in rows} == {"girih packed", "nn.EmbeddingBag", *drop_in}
        assert all(row["step ms"] > 0 for row in rows)
        assert [row["features"] for row in found["tables"][-1]["rows"]] == [2, 4]
    else:
        assert {row["what"] for row in rows} == {"girih", "dense alone", "dense alone, girih's Replica"}
        assert all(row["samples/s"] > 0 for row in rows)
    assert ran(file, *words, cwd=tmp_path, hidden=PEERS).returncode == 0  # which measures nothing again
    assert json.loads((tmp_path / "out" / "found.json").read_text())["tables"] == found["tables"]


@pytest.mark.heavy
def test_training_on_files_says_how_long_it_waits(tmp_path):
    words = ["--only", "training", "--rows", "40000", "--repeats", "1", "--json", "found.json"]
    done = ran(bench.FOLDER / "data.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "found.json").read_text())["tables"]
    alone, trained = table["rows"][:2], table["rows"][2:]
    assert all(row["samples/s"] > 0 for row in alone + trained)
    assert [row["what"] for row in trained] == [
        f"{data}, {model}"
        for model in ("lr", "deepfm")
        for data in ("batches given", "files, in order", "files, shuffled")
    ]
    for row in trained:
        assert 0 < row["waits after it"] <= row["waits"] + 0.05 < 1
        assert row["first batch ms"] > 0


@pytest.mark.slow
def test_rows_from_an_ssd_are_read_back_by_all_contestants(tmp_path):
    words = ["--records", "8000", "--reads", "300", "--rounds", "2", "--json", "found.json"]
    done = ran(bench.FOLDER / "ssd_reads.py", *words, cwd=tmp_path, hidden=("rocksdict",))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert "make bench-peers" in found["skipped"]["rocksdict"]
    (table,) = found["tables"]
    names = {row["what"] for row in table["rows"]}
    assert names >= {"girih, threads", "bare, 16 threads of preadv"}
    assert ("girih, io_uring" in names) == ("io_uring" not in found["skipped"])
    assert all(row["reads/s"] > 0 and row["of bare"] > 0 for row in table["rows"])
    assert list(tmp_path.iterdir()) == [tmp_path / "found.json"]


@pytest.mark.slow
def test_wide_schemas_are_compared_at_as_many_ids(tmp_path):
    words = "--features 3 12 --batch 8 --rows 60 --steps 3 --rounds 1 --hidden 4 --json found.json"
    done = ran(bench.FOLDER / "wide_features.py", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ids, batch = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert [(row["features"], row["batch"]) for row in ids["rows"]] == [(3, 32), (12, 8)]
    assert [(row["features"], row["batch"]) for row in batch["rows"]] == [(3, 8), (12, 8)]
    for row in ids["rows"] + batch["rows"]:
        phases = [row[name] for name in ("read", "pull", "forward", "backward", "push", "apply", "rest")]
        assert sum(phases) == pytest.approx(1e6 * row["step ms"] / (row["features"] * row["batch"]))
        assert all(phase > 0 for phase in phases)
        assert row["config s"] > 0 < row["begin s"]


@pytest.mark.heavy
def test_both_sides_of_each_threshold_are_timed(tmp_path):
    words = "--ids 64 40000 --dims 4 64 --bag 2 --rows-per-id 0.5 4 --batch 32 --repeats 2 --json found.json"
    done = ran(bench.FOLDER / "thresholds.py", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    dedup, ways = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert [(row["tables"], row["ids of each"], row["parted"]) for row in dedup["rows"]] == [
        (1, 64, "no"), (1, 40000, "yes"), (26, 32, "no"),
    ]  # fmt: skip
    assert all(row["Zipf"] > 0 and row["uniform"] > 0 for row in dedup["rows"])
    assert [(row["columns"], row["ids"], row["ids per key"] > 2) for row in ways["rows"]] == [
        (columns, *which)
        for columns in (4, 64)
        for which in (("uniform", True), ("uniform", False), ("Zipf", False))
    ]
    assert {row["chosen"] for row in ways["rows"]} == {"copies"}  # of so few rows
    assert all(row["copies, ms"] > 0 and row["in place, ms"] > 0 for row in ways["rows"])


@pytest.mark.heavy
def test_steps_are_timed_while_saves_are_under_way(tmp_path):
    words = ["--rows", "26000", "--repeats", "1", "--steps", "3", "--saves", "2"]
    done = ran(bench.FOLDER / "checkpoint.py", *words, "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "found.json").read_text())["tables"][-1]
    alone, saving = table["rows"]
    assert (alone["steps"], alone["lost s"]) == (3 * 3, None)
    assert saving["steps"] >= 2
    assert saving["save s"] > saving["to begin ms"] / 1e3 > 0
    assert all(row["median ms"] <= row["longest ms"] for row in (alone, saving))
    assert not [path for path in (tmp_path / "runs" / "bench").iterdir() if path.is_dir()]


def test_json_lies_below_runs_unless_told_otherwise(tmp_path):
    path = f"import sys; sys.path.insert(0, {str(bench.FOLDER)!r})\n"
    program = "import harness; r = harness.Report('x', harness.parser('x', None).parse_args()); r.finish()"
    (tmp_path / "x.py").write_text(path + program)
    done = ran(tmp_path / "x.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path(tmp_path, "runs", "bench", "x.json").read_text())["tables"] == []


@pytest.mark.slow
def test_calls_are_measured_without_zeromq_and_the_pages_get_their_parts(tmp_path):
    words = ["--rounds", "2", "--blocks", "2", "--out-mb", "0.01", "--back-mb", "0.02", "--json", "wire.json"]
    done = ran(bench.FOLDER / "wire.py", *words, cwd=tmp_path, hidden=("zmq",))
    assert done.returncode == 0, done.stderr
    assert "skipped: zmq: " in done.stdout
    results = json.loads((tmp_path / "wire.json").read_text())
    rows = {row["over"]: row for row in results["tables"][0]["rows"]}
    assert list(rows) == ["raw sockets", "TCP", "TLS", "shared memory", "in this process"]
    for row in rows.values():
        assert 0 < row["warm ms, lowest"] <= row["warm ms"] <= row["warm ms, highest"]
        assert 0 < row["empty µs, lowest"] <= row["empty µs"] <= row["empty µs, highest"]
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- wire: round trips -->\nold\n<!-- end -->\nafter\n")
    (tmp_path / "README.md").write_text("")
    program = "import harness, wire; harness.ROOT = harness.Path(); wire.main()\n"
    path = f"import sys; sys.path.insert(0, {str(bench.FOLDER)!r})\n"
    (tmp_path / "write.py").write_text(path + program)
    for _ in range(2):  # a page that has its parts stays as it is
        done = ran(tmp_path / "write.py", "--from-results", "wire.json", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "docs/page.md\n"), done.stderr
        before, begin, header, _, *lines, end, after = page.read_text().splitlines()
        marks = ("<!-- wire: round trips -->", "<!-- end -->")
        assert (before, begin, end, after) == ("before", *marks, "after")
        assert header.startswith("| over | cold, ms |")
        assert len(lines) == len(rows)
    refused = ran(tmp_path / "write.py", "--from-results", "write.py", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
