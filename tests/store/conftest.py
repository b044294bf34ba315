"""Arenas of each kind, and an index that must grow soon."""

import uuid

import pytest

from girih.store import File, Heap, Shared, remove_arena


@pytest.fixture(params=["heap", "shared", "file"])
def arena(request, tmp_path):
    """Options of one arena of each kind."""
    if request.param == "heap":
        yield Heap(reserve_rows=20_000)
    elif request.param == "file":
        yield File(path=str(tmp_path / "arena"), reserve_rows=20_000)
    else:
        options = Shared(segment=f"girih-test-{uuid.uuid4().hex[:12]}", reserve_rows=20_000)
        yield options
        remove_arena(options)


@pytest.fixture
def small_index(monkeypatch):
    """Begins with an index of 16 slots, so that few keys rehash it and probe around its end."""
    monkeypatch.setattr("girih.store.memory.shard_memory._FIRST_SLOTS", 16)
