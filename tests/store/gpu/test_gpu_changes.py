"""Rows in GPU memory note no changes, and say so."""

import pytest

from girih.errors import ConfigError
from girih.store import Store
from girih.store.gpu.options import Gpu
from support.store_verbs import group

pytestmark = pytest.mark.smoke


def test_rows_in_gpu_memory_cannot_be_published():
    with (
        Store(group(), arena=Gpu(chunk_bytes=4096, reserve_rows=20_000)) as store,
        pytest.raises(ConfigError, match=r"cannot be published; use store.tiers = \['dram'\]"),
    ):
        store.note_changes(1)
