"""Names of shared memory in a directory of the test's own."""

import subprocess
import sys

import pytest

from girih.processes import segments
from girih.processes.segments import new_prefix, remove_segments

pytestmark = pytest.mark.skipif(not segments._namespace(), reason="no /proc here")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SHARED_MEMORY", str(tmp_path))
    return tmp_path


def test_what_a_dead_owner_left_goes_with_the_next_run_and_nothing_else(memory):
    say = "from girih.processes.segments import new_prefix; print(new_prefix())"
    dead = subprocess.run(
        [sys.executable, "-c", say], capture_output=True, text=True, check=True
    ).stdout.strip()
    own = new_prefix()
    pid, start, namespace = own.removeprefix("girih-").split("-")[0].split(".")
    reused = f"girih-{pid}.{int(start) - 1}.{namespace}-00000000"  # its number is this process's now
    elsewhere = f"{dead.rpartition('.')[0]}.1-00000000"  # a container's, of which nothing is known here
    kept = [f"{own}-0-0", f"{elsewhere}-0-0", "girih-0a1b2c3d-0-0", "sem.other"]
    for name in (f"{dead}-0-0", f"{dead}-1-0", f"{reused}-0-0", *kept):
        (memory / name).touch()
    another = new_prefix()
    assert sorted(path.name for path in memory.iterdir()) == sorted(kept)
    assert another != own
    remove_segments(own)
    assert sorted(path.name for path in memory.iterdir()) == sorted(kept[1:])
