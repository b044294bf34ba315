"""Goals of a GPU beside made-up figures, and their section of a page."""

import json
import subprocess
import sys

import pytest

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")


def table(title, *rows):
    return {"title": title, "columns": list(rows[0]), "rows": list(rows)}


def of_sparse_half(keys, dim, optimizer, step_ms, num_bytes, forward=0.72, backward=0.49):
    return {
        "keys": keys,
        "D": dim,
        "optimizer": optimizer,
        "step ms": step_ms,
        "bytes": num_bytes,
        "forward, of copies": forward,
        "backward, of copies": backward,
    }


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


def bench_gpu(*words):
    done = subprocess.run(
        [sys.executable, "-m", "girih", "bench", "gpu", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_a_page_is_written_from_results_without_measuring(found, tmp_path):
    import gpu_goals

    page, result = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(f"before\n{gpu_goals.BEGIN}\nold\n{gpu_goals.END}\n")
    result.write_text(json.dumps(found))
    words = ("--from-results", "--json", str(result), "--page", str(page))
    status, stdout, stderr = bench_gpu(*words)
    assert (status, stderr) == (0, "")
    assert "missed: dedup of 1,048,576 ids, ms" in stdout
    assert page.read_text() == f"before\n{gpu_goals.BEGIN}\n{gpu_goals.section(found)}{gpu_goals.END}\n"
    assert json.loads(result.read_text()) == found
    found["machine"]["gpus"] = []
    result.write_text(json.dumps(found))
    for file in (result, tmp_path / "missing.json", page):
        status, stdout, stderr = bench_gpu("--from-results", "--json", str(file), "--page", str(page))
        assert (status, stdout) == (2, "")
        assert stderr.startswith(f"girih: bench gpu: {file}: ")
        assert stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", "3", '{"machine": 1}', '{"machine": {"gpus": []}, "tables": []}'])
def test_results_of_another_shape_are_one_line(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    status, stdout, stderr = bench_gpu("--from-results", "--json", str(file))
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"girih: bench gpu: {file}: ")
    assert stderr.count("\n") == 1


def test_a_page_that_cannot_be_written_is_named(found, tmp_path):
    result, page, plain = tmp_path / "gpu.json", tmp_path / "missing.md", tmp_path / "plain.md"
    result.write_text(json.dumps(found))
    plain.write_text("no markers\n")
    for file, reason in ((page, "No such file or directory"), (plain, "the markers ")):
        status, stdout, stderr = bench_gpu("--from-results", "--json", str(result), "--page", str(file))
        assert (status, stdout) == (2, "")
        assert stderr.startswith(f"girih: bench gpu: {file}: {reason}")
        assert stderr.count("\n") == 1


def test_without_a_gpu_the_benchmark_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    status, stdout, stderr = bench_gpu("--json", str(tmp_path / "x.json"))
    assert (status, stdout) == (2, "")
    assert stderr.startswith("girih: bench gpu: there is no GPU; ")
    assert stderr.count("\n") == 1


def test_a_full_disk_is_one_line(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    status, stdout, stderr = bench_gpu("--quick", "--parts", "keys", "--json", "/dev/full")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("girih: bench gpu: /dev/full: no space left on the disk")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "keys,tables"), "no part tables; expected some of sparse, keys, models, tiers, peers"),
        (("--parts", "peers", "--no-peers"), "--parts peers and --no-peers leave no part"),
    ],
)
def test_a_choice_of_no_part_is_one_line(words, message):
    status, _, stderr = bench_gpu(*words)
    assert status == 2
    assert message in stderr
    assert stderr.count("\n") == 1


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
