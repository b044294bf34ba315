"""What benchmarks rest on: turns, ratios, tables, and that contestants do the same work."""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("folder")


def test_contestants_take_turns_and_warm_up():
    import harness

    calls = []

    def contestant(name):
        def turn(number):
            calls.append((number, name))
            return float(number), 1.0

        return turn

    measured = harness.alternate({name: contestant(name) for name in "ab"}, rounds=3, warmup=2)
    assert calls[:4] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert measured["a"] == measured["b"] == [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]
    assert harness.median(measured["a"]) == 4.0
    assert harness.median_part(measured["a"], 0) == 3.0


def test_ratios_are_paired_by_round():
    import harness

    slowing = [(1.0,), (2.0,), (4.0,)]
    assert harness.ratio(slowing, [(2.0,), (4.0,), (8.0,)]) == 2.0
    assert harness.ratio(slowing, [(3.0,), (3.0,), (3.0,)]) == 1.5


def test_a_table_keeps_raw_values_and_refuses_unknown_columns():
    import harness

    table = harness.ResultTable("t", {"what": "{}", "ms": "{:.1f}"})
    table.row({"what": "x", "ms": 1.23456})
    table.row({"what": "y"})
    assert table.rows == [{"what": "x", "ms": 1.23456}, {"what": "y", "ms": None}]
    assert table.shown().row_count == 2
    with pytest.raises(KeyError, match="no column"):
        table.row({"who": "x"})


def test_streams_are_fresh_and_their_new_ids_are_new():
    import ids

    shape = ids.Shape(features=2, batch=50, rows=100, bag=3)
    stream = ids.Stream(shape, "uniform", new=0.2, seed=1)
    first, second = stream.next(), stream.next()
    assert len(first) == shape.num_ids == 300
    assert not np.array_equal(first, second)
    new = [set(batch[batch >= 100]) for batch in (first, second)]
    assert all(30 < len(each) < 90 for each in new)
    assert not new[0] & new[1]
    assert ids.num_unique(np.array([1, 1, 2, 1, 1, 1]), features=2) == 3
    assert max(ids.Stream(shape, "zipf", zipf=1.2).next()) > 100


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peers
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_contestants_of_the_sparse_half_agree(optimizer):
    """Same rows, ids and gradients: after three steps all give the same embeddings."""
    pytest.importorskip("fbgemm_gpu", reason="peers are not installed; make bench-peers")
    import ids
    import sparse_sides
    from upstream import gradient_arrives

    shape, dim = ids.Shape(features=2, batch=8, rows=30, bag=3), 4
    kinds = (sparse_sides.Packed, sparse_sides.Module, sparse_sides.Fbgemm, sparse_sides.Torch)
    stream, generator = ids.Stream(shape, "uniform", new=0.0), torch.Generator().manual_seed(0)
    batches = [stream.next() for _ in range(4)]
    gradients = [torch.randn(8, 2, dim, generator=generator) for _ in batches]
    moved = []
    for kind in kinds:
        side = kind(shape, dim, optimizer)
        side.fill(shape.rows)
        by_feature = kind in (sparse_sides.Module, sparse_sides.Torch)  # [F·B, D] instead of [B, F, D]
        probe = side.prepare(batches[-1], shape.bag)
        before = side.forward(probe).detach().clone()
        for batch, gradient in zip(batches[:3], gradients, strict=False):
            given = gradient.transpose(0, 1) if by_feature else gradient
            out = side.forward(side.prepare(batch, shape.bag))
            gradient_arrives(out, [given.reshape(out.shape).clone()])
            side.update()
        change = (side.forward(probe).detach() - before).reshape(-1, dim)
        if by_feature:
            change = change.view(2, 8, dim).transpose(0, 1).reshape(-1, dim)
        moved.append(change)
        side.close()
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def report_of(tmp_path):
    """Opens a report of one tag, whose JSON is written after every row."""
    import harness

    def opened(tag, **options):
        arguments = argparse.Namespace(json=tmp_path / "x.json", resume=tag, **options)
        return harness.Report("x", arguments)

    return opened


def test_a_report_is_on_disk_after_every_row(report_of, tmp_path):
    table = report_of("a").table("t", {"what": "{}", "ms": "{:.1f}"})
    for number in range(3):
        table.row({"what": "x", "ms": number})
        (written,) = json.loads((tmp_path / "x.json").read_text())["tables"]
        assert [row["ms"] for row in written["rows"]] == list(range(number + 1))
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_group_of_rows_is_on_disk_as_a_whole(report_of, tmp_path):
    report = report_of("a")
    tables = [report.table(title, {"ms": "{:.1f}"}) for title in ("t", "u")]
    with report.group():
        for table in tables:
            table.row({"ms": 1.0})
            assert not (tmp_path / "x.json").exists()
    written = json.loads((tmp_path / "x.json").read_text())["tables"]
    assert [len(table["rows"]) for table in written] == [1, 1]


def test_a_report_without_resume_and_a_pipe_are_written_once(tmp_path):
    import harness

    report = harness.Report("x", argparse.Namespace(json=tmp_path / "x.json"))
    report.table("t", {"ms": "{}"}).row({"ms": 1.0})
    assert not (tmp_path / "x.json").exists()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit((tmp_path / "pipe").read_text)
        report = harness.Report("x", argparse.Namespace(json=tmp_path / "pipe", resume=None))
        report.table("t", {"ms": "{}"}).row({"ms": 1.0})
        report.finish()
        assert json.loads(text.result(10))["tables"][0]["rows"] == [{"ms": 1.0}]


def test_a_full_disk_ends_a_benchmark_at_its_first_row():
    import harness

    report = harness.Report("x", argparse.Namespace(json=Path("/dev/full"), resume=None))
    with pytest.raises(SystemExit, match="no space left"):
        report.table("t", {"ms": "{}"}).row({"ms": 1.0})


def test_resume_without_a_tag_takes_the_fingerprint_of_the_code(monkeypatch, tmp_path):
    import harness

    for folder in ("src/girih", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    parser = harness.parser("x", None, resumes=True)
    assert parser.parse_args([]).resume is None
    assert parser.parse_args(["--resume", "a"]).resume == "a"
    tag = parser.parse_args(["--resume"]).resume
    (tmp_path / "benchmarks" / "a.py").write_text("# a comment\na = 1\n")
    assert parser.parse_args(["--resume"]).resume == tag
    (tmp_path / "benchmarks" / "a.py").write_text("a = 2\n")
    assert parser.parse_args(["--resume"]).resume != tag


def test_a_report_that_cannot_be_written_is_one_line(report_of, tmp_path):
    report = report_of("a")
    (tmp_path / "file").write_text("")
    (tmp_path / ".full.json.unfinished").symlink_to("/dev/full")
    for name, reason in (("file/x.json", "File exists"), ("full.json", "no space left on the disk")):
        report.file = tmp_path / name
        with pytest.raises(SystemExit, match=f"^girih: bench x: .*{reason}.*$"):
            report.finish()


def test_rows_of_the_same_tag_are_kept_and_those_of_others_are_not(report_of):
    first = report_of("a")
    for title in ("t", "u"):
        first.table(title, {"what": "{}", "ms": "{:.1f}"}).row({"what": title, "ms": 1.0})
    first.skip("t: some", "no reason")
    first.skip("u", "no reason")
    first.finish()
    again = report_of("a")
    again.forget("t")
    table = again.table("t", {"what": "{}", "ms": "{:.1f}"})
    assert table.has({"what": "t"})
    assert not table.has({"what": "t", "ms": 2.0})
    table.row({"what": "v", "ms": 2.0})
    sizes = [(table["title"], len(table["rows"])) for table in again.as_dict()["tables"]]
    assert sizes == [("t", 2), ("u", 1)]
    assert again.as_dict()["skipped"] == {"u": "no reason"}
    assert report_of("b").as_dict()["tables"] == []
    assert report_of("a", rounds=3).as_dict()["tables"] == []
    assert report_of("a", parts=["u"]).has("u")
    assert not report_of("a").has("v")
