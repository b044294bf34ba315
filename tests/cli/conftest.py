"""What tests of several benchmarks need."""

import sys

import pytest

from girih.cli import bench


@pytest.fixture(scope="module")
def folder():
    """Benchmarks import each other as a program does: from their own folder."""
    sys.path.insert(0, str(bench.FOLDER))
    yield
    sys.path.remove(str(bench.FOLDER))
