"""The public surface is an artefact: explicit, sorted, and free of heavy imports."""

import subprocess
import sys

import pytest

import girih


def test_all_is_sorted_small_and_complete():
    assert girih.__all__ == sorted(girih.__all__)
    assert len(girih.__all__) <= 40
    assert set(girih._HOME_OF) <= set(girih.__all__)
    for name in girih.__all__:
        assert getattr(girih, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="EmbeddingBagg"):
        getattr(girih, "EmbeddingBagg")  # noqa: B009


def test_import_loads_neither_torch_nor_numba():
    code = "import sys, girih; sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
