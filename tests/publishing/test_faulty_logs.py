"""Logs with faults: a follower keeps the version that it has, says why, and finds the way again."""

import json
import shutil

import pytest
from following import EVERY, SMALL, Replayed, assert_is, follower, publish_here, rows_in

from girih.checkpoint import Storage
from girih.errors import ConfigError
from girih.publishing.log import Log
from girih.publishing.manifest import write_pin


@pytest.fixture
def scene(patient, tmp_path):
    """A log into which that of a run comes, a follower of it, and the checkpoints of the run by step."""
    run, log = patient
    replayed = Replayed(log, tmp_path / "log")
    found = follower(tmp_path / "log", tmp_path / "followed")
    yield replayed, found, lambda version: run / "checkpoints" / f"step-{version.step:08d}"
    found.close()


def numbers(replayed):
    """Of versions with a segment that applies to one that is there too, and of snapshots beside them."""
    return replayed.old.numbers(whole=False), replayed.old.numbers(whole=True)


def check(found, checkpoint):
    assert_is(found.current, found.directory, checkpoint(found.current))


def damage(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def part_in(directory):
    return max(directory.glob("tables/*/*.safetensors"), key=lambda path: path.stat().st_size)


FAULTS = {
    "torn": (lambda place: cut(part_in(place)), "bytes, expected"),
    "a bit of a row": (lambda place: damage(part_in(place)), "checksum of"),
    "a bit of the header": (lambda place: damage(part_in(place), 40), "header"),
    "a bit of the parameters": (lambda place: damage(place / "dense.safetensors"), "checksum differs"),
    "a bit of the manifest": (lambda place: damage(place / "manifest.json", 60), "damaged"),
    "no manifest": (lambda place: (place / "manifest.json").unlink(), "no such file"),
    "no part": (lambda place: part_in(place).unlink(), "no such file"),
    "nothing": (shutil.rmtree, "no such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_segment_is_not_applied_and_a_snapshot_behind_it_is_the_way_on(scene, fault):
    replayed, found, checkpoint = scene
    segments, snapshots = numbers(replayed)
    broken = next(n for n in segments if n - 1 in segments and n not in snapshots)
    after = next(n for n in snapshots if n > broken)
    replayed.reveal(broken - 1)
    assert found.poll()
    spoil, told = FAULTS[fault]
    replayed.bring(broken)
    spoil(replayed.path(broken))
    replayed.say(broken)
    for _ in range(3):
        assert not found.poll()
    assert found.current.number == broken - 1
    assert [line for line in found.lines if told in line and f"version {broken} cannot be reached" in line]
    assert len([line for line in found.lines if "cannot be reached" in line]) == 1  # said once
    check(found, checkpoint)
    for number in segments:
        if number > broken:
            replayed.bring(number)
    replayed.bring(after, whole=True)
    replayed.say(after)
    assert found.poll()
    assert found.current.number == after
    assert f"begins again with snapshot {after}" in "\n".join(found.lines)
    check(found, checkpoint)


def test_a_segment_that_comes_later_than_the_head_is_waited_for(scene):
    replayed, found, checkpoint = scene
    segments, snapshots = numbers(replayed)
    late = next(n for n in segments if n - 1 in segments and n not in snapshots)
    replayed.reveal(late - 1)
    found.poll()
    replayed.say(late)
    assert not found.poll()
    replayed.bring(late)
    assert found.poll()
    assert found.current.number == late
    check(found, checkpoint)


def test_a_repeated_head_and_one_that_went_back_change_nothing(scene):
    replayed, found, checkpoint = scene
    segments, _ = numbers(replayed)
    replayed.reveal(segments[-1])
    assert found.poll()
    assert not found.poll()
    replayed.say(segments[-3])
    assert not found.poll()
    assert found.current.number == segments[-1]
    assert f"went back to version {segments[-3]}; stays at {segments[-1]}" in found.lines[-1]
    check(found, checkpoint)


def test_segments_that_changed_places_are_refused(scene):
    replayed, found, checkpoint = scene
    segments, snapshots = numbers(replayed)
    first = next(n for n in segments if n - 1 in segments and n + 1 in segments and n not in snapshots)
    replayed.reveal(first - 1)
    found.poll()
    for one, other in ((first, first + 1), (first + 1, first)):
        shutil.copytree(replayed.source / "segments" / f"{one:08d}", replayed.path(other), dirs_exist_ok=True)
    replayed.say(first + 1)
    assert not found.poll()
    assert f"says segment {first + 1}; expected segment {first}" in found.lines[-1]
    check(found, checkpoint)


def test_a_segment_of_another_run_is_refused(scene, config, tmp_path):
    replayed, found, checkpoint = scene
    segments, snapshots = numbers(replayed)
    number = next(n for n in segments if n - 1 in segments and n not in snapshots)
    other = tmp_path / "other"
    publish_here(
        config, tmp_path / "other-run", other, *EVERY, SMALL, "publish.every_steps=1", "publish.keep=50"
    )
    replayed.reveal(number - 1)
    found.poll()
    shutil.copytree(other / "segments" / f"{number:08d}", replayed.path(number))
    replayed.say(number)
    assert not found.poll()
    assert "applies to version" in found.lines[-1]
    check(found, checkpoint)


def test_a_damaged_head_is_told_and_changes_nothing(scene):
    replayed, found, checkpoint = scene
    segments, _ = numbers(replayed)
    replayed.reveal(segments[-2])
    found.poll()
    before = found.current.number
    (replayed.target / "head.json").write_text('{"crc32": 1, "format": 1}')
    assert not found.poll()
    assert "head.json: damaged" in found.lines[-1]
    (replayed.target / "head.json").unlink()
    assert not found.poll()
    assert found.current.number == before
    replayed.reveal(segments[-1])
    assert found.poll()
    check(found, checkpoint)


def test_versions_of_another_schema_are_refused(scene, config, tmp_path):
    replayed, found, _ = scene
    segments, _ = numbers(replayed)
    replayed.reveal(segments[0])
    found.poll()
    log, dims = tmp_path / "log", [f"features.{name}.dim=8" for name in ("user", "item", "tags")]
    publish_here(config, tmp_path / "wider", log, *EVERY, *dims, "publish.every_steps=2")
    before = found.current.number
    assert not found.poll()
    assert found.current.number == before
    assert "has schema" in found.lines[-1]


def test_a_pin_takes_followers_back_and_they_come_on_again_without_it(scene):
    replayed, found, checkpoint = scene
    segments, _ = numbers(replayed)
    replayed.reveal(segments[-1])
    found.poll()
    log = Log(Storage.at(replayed.target))
    back = segments[1]
    log.go_back_to(back)
    assert found.poll()
    assert found.current.number == back
    check(found, checkpoint)
    assert not found.poll()
    log.go_on()
    assert found.poll()
    assert found.current.number == segments[-1]
    check(found, checkpoint)


def test_a_follower_goes_on_with_what_it_left_and_checks_it(scene, tmp_path):
    replayed, found, checkpoint = scene
    segments, _ = numbers(replayed)
    replayed.reveal(segments[-3])
    found.poll()
    found.close()
    first = follower(replayed.target, tmp_path / "followed")
    with pytest.raises(ConfigError, match="another follower uses it"):
        follower(replayed.target, tmp_path / "followed")
    first.close()
    assert f"goes on with version {segments[-3]}" in first.lines[0]
    replayed.reveal(segments[-1])
    again = follower(replayed.target, tmp_path / "followed")
    assert again.poll()
    check(again, checkpoint)
    again.close()
    damage(tmp_path / "followed" / again.current.rows[0][-1].name)
    anew = follower(replayed.target, tmp_path / "followed")
    assert anew.current is None
    assert "damaged" in anew.lines[0]
    assert anew.poll()
    check(anew, checkpoint)
    anew.close()


def test_a_current_file_of_another_log_or_none_at_all_begins_anew(patient, tmp_path):
    _, log = patient
    directory = tmp_path / "followed"
    first = follower(log, directory)
    first.poll()
    first.close()
    shutil.copytree(log, tmp_path / "copy")
    other = follower(tmp_path / "copy", directory)
    assert "has versions of" in other.lines[0]
    assert other.poll()
    assert rows_in(other.current, directory)
    other.close()
    current = json.loads((directory / "signature.json").read_text())
    (directory / "signature.json").write_text(json.dumps(current | {"crc32": 0}))
    again = follower(tmp_path / "copy", directory)
    assert "damaged" in again.lines[0]
    assert again.poll()
    again.close()


def test_an_empty_log_is_waited_for(tmp_path):
    found = follower(tmp_path / "nothing", tmp_path / "followed")
    assert not found.poll()
    assert not found.poll()
    assert len(found.lines) == 1
    assert "nothing is published there yet" in found.lines[0]
    write_pin(Storage.at(tmp_path / "nothing"), 3)
    assert not found.poll()
    found.close()
