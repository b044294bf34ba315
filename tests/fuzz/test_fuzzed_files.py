"""Files of all formats, changed by a random generator and sealed again: girih refuses them in a line, or finds what anybody finds in them.

``GIRIH_FUZZED`` is the number of files of all formats together, ``GIRIH_SEED`` another beginning.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import time
import traceback

import pytest
from fuzzed_formats import FORMATS
from mutations import change_tensors, change_tree, dump

from girih.errors import GirihError

FILES = int(os.environ.get("GIRIH_FUZZED", "210"))
SEED = int(os.environ.get("GIRIH_SEED", "0"))
ONLY = os.environ.get("GIRIH_FUZZED_ONLY")
EVIL = "from pathlib import Path\nPath('ran').touch()\nclass M: pass\n"
MOST_BYTES = 3 << 30
SLOW_S = 30.0

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(0)]


@pytest.fixture(autouse=True)
def little_memory():
    """Has large allocations fail, as on a machine that is small."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def change(path, rng):
    """Changes one file; returns what was done."""
    if path.suffix == ".safetensors":
        align = 64 if path.name.startswith("rows-") else 8
        content, what = change_tensors(path.read_bytes(), rng, align)
        path.write_bytes(content)
        return f"{path.name}: {what}"
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    tree, what = change_tree(json.loads(lines[number]), rng)
    lines[number] = dump(tree)
    path.write_text("\n".join(lines), errors="surrogatepass")
    return f"{path.name}: {what}"


def spoil(path, rng, outside):
    """Puts something else in the place of a file."""
    kind = rng.choice(["directory", "pipe", "device", "link", "gone", "empty", "text"])
    content = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (outside / path.name).write_bytes(content)
        path.symlink_to(outside / path.name)
    elif kind in ("empty", "text"):
        path.write_bytes(b"" if kind == "empty" else b"\xff\xfe{")
    return f"{path.name}: {kind}"


def outcome_of(fuzzed, number, directory, outside):
    """The changes of a file, and what is wrong with what became of them; "" if nothing is."""
    rng = random.Random(f"{SEED}/{type(fuzzed).__name__}/{number}")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(fuzzed.source, directory)
    if getattr(fuzzed, "memory", None) is not None:
        fuzzed.memory.mkdir(exist_ok=True)
        for name in ("girih-ATTACK", "girih-1.2.3-x", "girih-4194999.78.1-x"):
            (fuzzed.memory / name).touch()
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice(fuzzed.files(directory))
        with contextlib.suppress(Exception):  # that a change before left nothing to change
            done.append(change(path, rng))
    if rng.random() < 0.85:
        fuzzed.seal(directory)
    elif path.suffix == ".json":
        fuzzed.seal_index(path)
    if rng.random() < 0.04:
        done.append(
            spoil(
                rng.choice([each for each in fuzzed.files(directory) if not each.is_symlink()]), rng, outside
            )
        )
    before, start = {path: path.stat().st_mtime_ns for path in outside.iterdir()}, time.monotonic()
    try:
        found = fuzzed.open(directory)
    except GirihError as error:
        return (
            done,
            ""
            if len(str(error).splitlines()) == 1 and len(str(error)) < 2000
            else f"told: {str(error)[:300]!r}",
            True,
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return done, "".join(traceback.format_exception(error))[-1500:], True
    finally:
        assert time.monotonic() - start < SLOW_S, done
        assert before == {path: path.stat().st_mtime_ns for path in outside.iterdir()}, done
    if found is None:
        return done, "", True
    try:
        expected = fuzzed.read(directory, found)
    except Exception as error:
        return done, f"opened, though nobody else can read it: {error!r}"[:500], False
    wrong = [name for name in expected if expected[name] != found.get(name)]
    return done, f"opened, with other {wrong}" if wrong else "", False


@pytest.mark.parametrize("fuzzed", FORMATS, indirect=True)
def test_a_changed_file_is_refused_or_read_as_it_is(fuzzed, tmp_path, monkeypatch):
    outside, work = tmp_path / "outside", tmp_path / "work"
    outside.mkdir()
    work.mkdir()
    (work / "evil.py").write_text(EVIL)
    monkeypatch.chdir(work)
    directory = tmp_path / fuzzed.source.name
    numbers = range(-(-FILES // len(FORMATS))) if ONLY is None else [int(ONLY)]
    found = [(number, *outcome_of(fuzzed, number, directory, outside)) for number in numbers]
    wrong = [f"no. {number}: {done}: {what}" for number, done, what, _ in found if what]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:10])
    assert not (work / "ran").exists()
    refused = sum(is_refused for *_, is_refused in found)
    assert ONLY is not None or 0 < refused < len(found)


@pytest.mark.parametrize("fuzzed", FORMATS, indirect=True)
def test_an_unchanged_file_is_read_as_it_is(fuzzed, tmp_path):
    directory = tmp_path / fuzzed.source.name
    shutil.copytree(fuzzed.source, directory)
    if getattr(fuzzed, "memory", None) is not None:
        fuzzed.memory.mkdir()
    fuzzed.seal(directory)
    found = fuzzed.open(directory)
    assert found == fuzzed.read(directory, found)
