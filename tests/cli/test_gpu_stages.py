"""The stages of ``make gpu``, with the stages that need no GPU and with small stages made here."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
import time
import gpu_stages
from gpu_stages import Stage

def code():
    gpu_stages.START = time.monotonic()
    return "{code}"

gpu_stages.STAGES = ({stages})
gpu_stages.TOTAL_S = {total_s}
gpu_stages.code = code
gpu_stages.PROBE = "print('{{\\"gpu\\": null, \\"versions\\": {{}}}}')"
sys.exit(gpu_stages.main())
"""
"""A script with other stages, a made-up hash of the code, and a probe that does not import torch.

Its time begins when it has probed the interpreter.
"""
ROWS = """
import itertools, json, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
for number in itertools.count():
    print("row", number)
    with open(sys.argv[1] + "/tests.jsonl", "a") as file:
        file.write(json.dumps({"test": number, "outcome": "passed"}) + chr(10))
    time.sleep(0.02)
"""
"""A stage that writes rows without end; its child has a group of its own."""


WITHOUT_METADATA = """
import importlib.metadata
original = importlib.metadata.version

def version(name):
    if name == "girih":
        raise importlib.metadata.PackageNotFoundError(name)
    return original(name)

importlib.metadata.version = version
import girih.checkpoint
import girih.cli.info
import girih.serving.app
"""
"""Imports modules as a checkout does that is not installed."""


def start(out, *words, **variables):
    environment = {**os.environ, "GPU_PYTHON": sys.executable, "GPU_OUT": str(out), **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "dev"), str(ROOT / "src")])
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(out, *words, **variables):
    process = start(out, *words, **variables)
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def small(*stages, code="abc", total_s=570):
    stages = "".join(f"{stage}, " for stage in stages)
    return sys.executable, "-c", SMALL.format(stages=stages, code=code, total_s=total_s)


def records(out):
    return {record["stage"]: record for record in json.loads((out / "stages.json").read_text())["stages"]}


def lines(out):
    file = out / "tests.jsonl"
    return file.read_text().splitlines() if file.is_file() else []


def wait_for(condition):
    deadline = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(out):
    """Command lines of processes whose environment names this output folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GPU_TESTS={out}" in file.read_text(errors="replace"):
                found.append(file.with_name("cmdline").read_text())
        except OSError:
            continue
    return found


def test_the_list_names_the_stages_in_order_and_their_limits():
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu-list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:5] == ["software", "cpu", "kernels", "determinism", "sparse"]
    *limits, total = [int(number) for number in re.findall(r"(\d+) s  ", done.stdout)]
    assert sum(limits) == total <= 570


def test_every_file_of_a_stage_exists():
    sys.path.insert(0, str(ROOT / "dev"))
    try:
        from gpu_plan import STAGES
    finally:
        sys.path.remove(str(ROOT / "dev"))
    words = [word for stage in STAGES for command in stage.commands for word in command]
    files = [word for word in words if word.startswith("tests/")]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_a_checkout_that_is_not_installed_knows_its_version():
    subprocess.run([sys.executable, "-c", WITHOUT_METADATA], check=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GPU_PYTHON": "/no/such/python"}, "GPU_PYTHON = /no/such/python: no such program; expected"),
        ({"GPU_PYTHON": "/bin/false"}, "GPU_PYTHON = /bin/false: it ends with status 1; expected"),
        ({"GPU_STAGES": "cpu,kernel"}, "no stage kernel; expected some of software, cpu, kernels,"),
        ({"GPU_STAGES": ","}, "GPU_STAGES: no stage ,; expected some of software, cpu, kernels,"),
        ({"GPU_INTERPRET": "true"}, "GPU_INTERPRET = true: expected 0 or 1"),
        ({"GPU_PATIENCE": "long"}, "GPU_PATIENCE = long: expected a number"),
        ({"GPU_OUT": "/proc/results"}, "GPU_OUT = /proc/results: "),
        ({"GPU_OUT": f"{ROOT}/Makefile"}, "expected a folder that can be written"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path, variables, message):
    status, stdout, stderr = run(tmp_path, sys.executable, "dev/gpu_stages.py", **variables)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"stages": 1}', '{"stages": [1]}', '{"stages": [{}]}'])
def test_records_of_another_shape_are_one_line_and_status_2(tmp_path, content):
    (tmp_path / "stages.json").write_text(content)
    status, stdout, stderr = run(tmp_path, sys.executable, "dev/gpu_stages.py", GPU_STAGES="kernels")
    assert (status, stdout) == (2, "")
    assert f"GPU_OUT = {tmp_path}: stages.json contains no records of stages; expected" in stderr
    assert stderr.count("\n") == 1


def test_a_line_that_was_cut_off_loses_only_itself(tmp_path):
    lines = ('{"outcome": "passed"}', '{"outcome": "pas\xff', "3", '{"outcome": "failed"}', '{"outc')
    (tmp_path / "tests.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    stage = f"Stage('rows', 2, '', [('-c', {ROWS!r}, '{{out}}')], needs_gpu=False)"
    assert "rows: failed: over its limit of 2 s" in run(tmp_path, *small(stage))[1]
    num_rows = len((tmp_path / "tests.jsonl").read_bytes().splitlines()) - len(lines)
    assert records(tmp_path)["rows"]["tests"] == {"passed": num_rows}  # the first row ends the last line


@pytest.mark.parametrize("file", ["log.txt", "stages.json.new"])
def test_a_full_disk_is_a_line_of_the_table(tmp_path, file):
    (tmp_path / file).symlink_to("/dev/full")
    stage = "Stage('good', 30, '', [('-c', 'print(1)')], needs_gpu=False)"
    status, stdout, stderr = run(tmp_path, *small(stage))
    assert (status, stderr) == (1, "")
    assert f"good: failed: {tmp_path}: No space left on device\n" in stdout
    assert "0 passed, 1 failed, 0 not run" in stdout


def test_a_stage_without_its_gpu_is_not_run_and_counts_as_no_pass(tmp_path):
    environment = {"CUDA_VISIBLE_DEVICES": "", "GPU_STAGES": "kernels"}
    status, stdout, _ = run(tmp_path, "make", "gpu", **environment)
    assert status == 2  # make's own; the script's is 1
    assert "not run: no GPU" in stdout
    assert "0 passed, 0 failed, 1 not run" in stdout
    assert not (tmp_path / "stages.json").exists()


def test_a_stage_is_skipped_only_after_a_pass_with_the_same_code(tmp_path):
    stages = (
        "Stage('good', 30, '', [('-c', 'print(1)')], needs_gpu=False)",
        "Stage('bad', 30, '', [('-c', 'import sys; sys.exit(chr(97))')], needs_gpu=False)",
    )
    assert run(tmp_path, *small(*stages))[0] == 1
    assert records(tmp_path)["good"]["status"] == "passed"
    assert records(tmp_path)["bad"]["status"] == "failed: status 1: a"
    _, stdout, _ = run(tmp_path, *small(*stages))
    assert "good: passed before" in stdout
    assert "bad: failed: status 1: a" in stdout
    _, stdout, _ = run(tmp_path, *small(*stages, code="abd"))
    assert "good: passed\n" in stdout
    file = tmp_path / "stages.json"
    file.write_text(file.read_text().replace('"device": "', '"device": "another '))
    assert "good: passed\n" in run(tmp_path, *small(*stages))[1]


def test_a_stage_over_its_limit_is_killed_and_keeps_its_rows(tmp_path):
    stages = (
        f"Stage('rows', 2, '', [('-c', {ROWS!r}, '{{out}}')], needs_gpu=False)",
        "Stage('good', 30, '', [('-c', 'print(1)')], needs_gpu=False)",
    )
    status, stdout, _ = run(tmp_path, *small(*stages))
    assert status == 1
    assert "rows: failed: over its limit of 2 s" in stdout
    assert "1 passed, 1 failed, 0 not run" in stdout
    assert records(tmp_path)["rows"]["tests"]["passed"] == len(lines(tmp_path)) > 3
    assert processes_of(tmp_path) == []


def test_a_stage_that_the_end_of_all_stages_stops_says_so(tmp_path):
    stages = (
        f"Stage('rows', 60, '', [('-c', {ROWS!r}, '{{out}}')], needs_gpu=False)",
        "Stage('good', 30, '', [('-c', 'print(1)')], needs_gpu=False)",
    )
    stdout = run(tmp_path, *small(*stages, total_s=3))[1]
    assert "rows: failed: the 3 s of all stages were over" in stdout
    assert "good: not run: the 3 s of all stages were over" in stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_keeps_every_row_and_stops_all_processes(tmp_path, number):
    stages = (
        f"Stage('rows', 60, '', [('-c', {ROWS!r}, '{{out}}')], needs_gpu=False)",
        "Stage('good', 30, '', [('-c', 'print(1)')], needs_gpu=False)",
    )
    process = start(tmp_path, *small(*stages))
    wait_for(lambda: lines(tmp_path))
    time.sleep(random.random())
    before = lines(tmp_path)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    after = lines(tmp_path)
    assert after[: len(before)] == before
    assert [json.loads(line)["test"] for line in after] == list(range(len(after)))
    assert records(tmp_path)["rows"]["status"] == f"failed: stopped by {number.name}"
    assert f"good: not run: {number.name} came before" in stdout
    assert processes_of(tmp_path) == []


def test_a_killed_script_leaves_records_that_say_so(tmp_path):
    process = start(
        tmp_path, *small(f"Stage('rows', 60, '', [('-c', {ROWS!r}, '{{out}}')], needs_gpu=False)")
    )
    wait_for(lambda: lines(tmp_path))
    process.kill()
    process.communicate()
    assert records(tmp_path)["rows"]["status"] == "failed: the script was killed during this stage"
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GPU_TESTS={tmp_path}" in file.read_text(errors="replace"):
                os.kill(int(file.parent.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(3))
def test_make_gpu_that_is_terminated_keeps_all_finished_tests(tmp_path, moment):
    process = start(tmp_path, "make", "gpu", GPU_STAGES="software,cpu", GPU_PATIENCE="10")
    wait_for(lambda: lines(tmp_path) if moment else (tmp_path / "stages.json").is_file())
    time.sleep(random.random())
    before = lines(tmp_path)
    process.terminate()
    process.communicate(timeout=60)
    wait_for(lambda: not processes_of(tmp_path))
    after = [json.loads(line) for line in lines(tmp_path)]
    assert lines(tmp_path)[: len(before)] == before
    assert {test["outcome"] for test in after} <= {"passed"}
    running = [record for record in records(tmp_path).values() if record["status"].startswith("failed")]
    assert [record["status"] for record in running] in ([], ["failed: stopped by SIGTERM"])


@pytest.mark.slow
def test_stages_that_need_no_gpu_pass(tmp_path):
    status, stdout, _ = run(tmp_path, "make", "gpu", GPU_STAGES="software,cpu", GPU_PATIENCE="10")
    assert status == 0, stdout
    assert "2 passed, 0 failed, 0 not run" in stdout
    assert {test["stage"] for test in map(json.loads, lines(tmp_path))} == {"cpu"}
