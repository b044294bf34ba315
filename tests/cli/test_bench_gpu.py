"""Goals of a GPU beside made-up figures, and their section of a page."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")


def table(title, *rows):
    return {"title": title, "columns": list(rows[0]), "rows": list(rows)}


def of_sparse_half(keys, dim, optimizer, step_ms, num_bytes, forward=0.72, backward=0.49):
    return {
        "keys": keys, "D": dim, "optimizer": optimizer, "step ms": step_ms, "bytes": num_bytes,
        "forward, of copies": forward, "backward, of copies": backward,
    }  # fmt: skip


def test_kernels_with_little_time_are_one_row():
    import gpu_profile

    microseconds = Counter({"a": 60.0, "b": 39.5, "c": 0.25, "d": 0.25})
    rows = gpu_profile.rows_of(microseconds, Counter({"a": 1, "b": 2, "c": 3, "d": 4}))
    assert [(row["kernel"], row["launches"], row["µs"]) for row in rows] == [
        ("a", 1, 60.0), ("b", 2, 39.5), ("others", 7, 0.5), ("all", 10, 100.0),
    ]  # fmt: skip
    assert sum(row["share"] for row in rows[:-1]) == pytest.approx(rows[-1]["share"]) == 1


@pytest.fixture
def found():
    """A report as gpu.py may write it; nothing here was measured."""
    gpu = {"name": "GPU X", "memory_bytes": 139 << 30, "capability": "9.0", "multiprocessors": 132}
    return {
        "command": "girih bench gpu",
        "when": "2030-01-02T03:04:05+00:00",
        "machine": {"processor": "CPU Y", "cores": 16, "cuda": "13.0", "gpus": [gpu]},
        "versions": {"torch": "2.13", "triton": "3.7"},
        "tables": [
            table("copies of 1 GB on the device, read and written", {"bytes/s": 4e12}),
            table(
                "the sparse half on a GPU",
                of_sparse_half("26 × 65,536", 64, "sgd", 1.5, 2_000_000_000),
                of_sparse_half("10 × 104,858", 128, "sgd", 1.05, 2_000_000_000),
                of_sparse_half("10 × 104,858", 128, "adam", 1.5, 7_200_000_000),
            ),
            table(
                "keys alone",
                {"what": "dedup", "unique": 9, "keys": 1 << 20, "ms": 0.12, "keys/s": 1e9},
                {
                    "what": "find, the index half full",
                    "unique": 1 << 20,
                    "keys": 1 << 20,
                    "ms": 0.3,
                    "keys/s": 3.1e9,
                },
            ),
            table("tiers: 10 tables", {"unique keys, of the hot rows": 0.8, "host ms": 20.0}),
            table(
                "whole models, samples/s",
                {"model": "DeepFM", "dense half": "plain", "batch": 65_536, "of it": 0.91},
                {"model": "DeepFM", "dense half": "compiled", "batch": 65_536, "of it": None},
            ),
        ],
        "not_identical": ["tables differ"],
        "skipped": {"fbgemm_gpu": "no wheel"},
    }


def test_goals_are_met_or_missed_figure_by_figure(found):
    import gpu_goals

    verdicts = {}
    for each in gpu_goals.compare_goals(found):
        verdicts[each.goal.what, each.goal.column, each.goal.published] = (each.bound, each.verdict)
    million = "10 × 104,858, D = 128, {}: a step"
    assert verdicts["26 × 65,536, D = 64, sgd: forward", "forward, of copies", None] == (0.7, "met")
    assert (
        verdicts["26 × 65,536, D = 64, sgd: backward and update", "backward, of copies", None][1] == "missed"
    )
    assert verdicts["26 × 65,536, D = 64, adam: forward", "forward, of copies", None][1] == "not measured"
    assert verdicts[million.format("sgd"), "step ms", None] == (1.0, "missed")
    assert verdicts[million.format("sgd"), "step ms", "dynamicemb"] == (pytest.approx(1.10, abs=0.005), "met")
    assert verdicts[million.format("sgd"), "step ms", "FBGEMM, static tables"][1] == "missed"
    bound, verdict = verdicts[million.format("adam"), "step ms", None]  # beyond the machine: 1.8 ms of bytes
    assert bound == pytest.approx(2.0)
    assert verdict == "met"
    assert verdicts["dedup of 1,048,576 ids", "ms", None] == (0.1, "missed")
    assert verdicts["finding keys, the index half full", "keys/s", None] == (3e9, "met")
    assert verdicts["DeepFM, plain, beside its dense half alone", "of it", None] == (0.9, "met")
    assert verdicts["DeepFM, compiled, beside its dense half alone", "of it", None][1] == "not measured"
    hot = "a tenth of the rows hot, unique keys 80% of them"
    assert verdicts[hot, "host ms", "dynamicemb"] == (24.0, "met")
    assert verdicts[hot, "host ms", "FBGEMM, UVM"] == (15.0, "missed")


def test_the_section_of_a_page_is_written_anew(found, tmp_path):
    import gpu_goals

    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{gpu_goals.BEGIN}\nold\n{gpu_goals.END}\nbehind\n")
    for _ in range(2):
        gpu_goals.write_section(page, found)
    written = page.read_text()
    assert written.startswith(f"before\n{gpu_goals.BEGIN}\n`girih bench gpu`, 2030-01-02, on GPU X (139 GiB)")
    assert written.endswith(f"{gpu_goals.END}\nbehind\n")
    assert "old" not in written
    assert "| dedup of 1,048,576 ids | ≤ 0.1 | 0.12 | missed | ours |" in written
    assert "≤ 2 (0.9 of the limit) | 1.5 | met" in written
    assert "Left out: fbgemm_gpu: no wheel." in written
    found["machine"]["gpus"] = []
    with pytest.raises(ValueError, match="measured without a GPU"):
        gpu_goals.write_section(page, found)
    assert page.read_text() == written


@pytest.mark.parametrize(
    ("gpu", "bounds", "source"),
    [
        ("NVIDIA H100 80GB HBM3", (1.58, 1.84), "dynamicemb, published for an H100, unscaled"),
        ("NVIDIA H200", (1.10, 1.28), "dynamicemb, published for an H100, scaled to an H200 by bandwidth"),
    ],
)
def test_published_times_are_scaled_by_the_name_of_the_gpu(found, gpu, bounds, source):
    import gpu_goals

    found["machine"]["gpus"][0]["name"] = gpu
    found["tables"][1]["rows"][1]["step ms"] = 1.5
    published = [each for each in gpu_goals.compare_goals(found) if each.goal.published == "dynamicemb"][:2]
    assert [each.bound for each in published] == pytest.approx(bounds, abs=0.005)
    assert published[0].verdict == ("met" if "H100" in gpu else "missed")
    assert f"| {source} |" in gpu_goals.section(found)
    assert ("ours are for an H200" in gpu_goals.section(found)) == ("H100" in gpu)


@pytest.fixture
def bench_gpu(monkeypatch, capsys):
    """Runs the benchmark in this process; returns its status, output and errors. The interpreter's start takes seconds."""
    import gpu

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_page_is_written_from_results_without_measuring(bench_gpu, found, tmp_path):
    import gpu_goals

    page, result = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(f"before\n{gpu_goals.BEGIN}\nold\n{gpu_goals.END}\n")
    result.write_text(json.dumps(found))
    status, stdout, stderr = bench_gpu("--from-results", "--json", result, "--page", page)
    assert (status, stderr) == (0, "")
    assert "missed: dedup of 1,048,576 ids, ms" in stdout
    assert page.read_text() == f"before\n{gpu_goals.BEGIN}\n{gpu_goals.section(found)}{gpu_goals.END}\n"
    assert json.loads(result.read_text()) == found


def test_results_that_cannot_be_used_are_one_line(bench_gpu, found, tmp_path):
    found["machine"]["gpus"] = []
    contents = (
        json.dumps(found),
        "no JSON",
        "[]",
        "3",
        '{"machine": 1}',
        '{"machine": {"gpus": []}, "tables": []}',
    )
    files = [tmp_path / "missing.json"]
    for number, content in enumerate(contents):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(content)
    page = tmp_path / "gpu.md"
    page.write_text("unchanged")
    for file in files:
        status, stdout, stderr = bench_gpu("--from-results", "--json", file, "--page", page)
        assert (status, stdout) == (2, "")
        assert stderr.startswith(f"girih: bench gpu: {file}: ")
        assert stderr.count("\n") == 1
    assert page.read_text() == "unchanged"


def test_a_page_that_cannot_be_written_is_named(bench_gpu, found, tmp_path):
    result, page, plain = tmp_path / "gpu.json", tmp_path / "missing.md", tmp_path / "plain.md"
    result.write_text(json.dumps(found))
    plain.write_text("no markers\n")
    for file, reason in ((page, "No such file or directory"), (plain, "the markers ")):
        status, stdout, stderr = bench_gpu("--from-results", "--json", result, "--page", file)
        assert (status, stdout) == (2, "")
        assert stderr.startswith(f"girih: bench gpu: {file}: {reason}")
        assert stderr.count("\n") == 1


def test_a_choice_of_no_part_is_one_line(bench_gpu):
    for words, message in (
        (
            ("--parts", "keys,tables"),
            "no part tables; expected some of sparse, kernels, keys, models, tiers, peers",
        ),
        (("--parts", "peers", "--no-peers"), "--parts peers and --no-peers leave no part"),
    ):
        status, _, stderr = bench_gpu(*words)
        assert status == 2
        assert message in stderr
        assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("interpret", "words", "status", "error"),
    [
        ("0", ("--json", "x.json"), 2, "there is no GPU; "),
        (
            "1",
            ("--quick", "--parts", "keys", "--json", "/dev/full"),
            1,
            "/dev/full: no space left on the disk",
        ),
    ],
    ids=["no GPU", "a full disk"],
)
def test_the_program_ends_with_one_line(tmp_path, interpret, words, status, error):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": interpret}
    command = [sys.executable, "-m", "girih", "bench", "gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"girih: bench gpu: {error}")
    assert done.stderr.count("\n") == 1


def test_training_is_compared_with_a_run_of_the_same_shape_on_a_cpu(capsys):
    import gpu_train

    parser = gpu_train.options()
    assert 0.84 < gpu_train.reference(parser, parser.parse_args([])) < 0.86
    assert json.loads(gpu_train.REFERENCE.read_text())["options"]["device"] == "cpu"
    with pytest.raises(SystemExit):
        gpu_train.reference(parser, parser.parse_args(["--steps", "30"]))
    assert "gpu-train-cpu.json has steps = 3000, this run 30" in capsys.readouterr().err


def test_the_page_has_the_markers():
    import gpu_goals

    page = (bench.FOLDER.parent / "docs" / "gpu.md").read_text()
    assert page.index(gpu_goals.BEGIN) < page.index(gpu_goals.END)


def test_the_page_has_the_registers_that_were_found():
    import gpu_registers

    root = bench.FOLDER.parent
    (table,) = json.loads((root / "docs" / "results" / "gpu-registers.json").read_text())["tables"]
    page = (root / "docs" / "gpu.md").read_text()
    shown = page[page.index(gpu_registers.BEGIN) : page.index(gpu_registers.END)]
    for row in table["rows"]:
        assert f"| {' | '.join(str(value) for value in row.values())} |" in shown
