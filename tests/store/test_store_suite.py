"""The conformance suite of stores: against the store on each kind of arena, and against the fake."""

import contextlib
import uuid

import pytest

from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import File, Heap, Shared, Store, remove_arena
from support.fake_store import FakeStore
from support.stores import StoreSuite

# Plain Python sees arrays alike wherever their memory is: one kind of arena shows what the kernels do.
with_the_jit = pytest.mark.heavy if JIT_DISABLED else lambda tests: tests


class OnArena(StoreSuite):
    """Stores on arenas of one kind."""

    @pytest.fixture(autouse=True)
    def arenas(self, tmp_path):
        self.directory, self.made = tmp_path, contextlib.ExitStack()
        with self.made:
            yield

    def make(self, spec, **where):
        options = self.options(uuid.uuid4().hex[:12])
        self.made.callback(remove_arena, options)
        return self.made.enter_context(Store(spec, arena=options, **where))


class TestHeap(OnArena):
    def options(self, name):
        return Heap(reserve_rows=20_000)


@with_the_jit
class TestFile(OnArena):
    def options(self, name):
        return File(path=str(self.directory / name), reserve_rows=20_000)


@with_the_jit
class TestShared(OnArena):
    def options(self, name):
        return Shared(segment=f"girih-test-{name}", reserve_rows=20_000)


@with_the_jit
class TestFake(StoreSuite):
    def make(self, spec, **where):
        return FakeStore(spec, **where)

    def take(self, store):
        return store.snapshot()
