"""The public surface is an artefact: explicit, sorted, and free of heavy imports."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import girih


def test_all_is_sorted_small_and_complete():
    assert girih.__all__ == sorted(girih.__all__)
    assert len(girih.__all__) <= 41
    assert set(girih._HOME_OF) <= set(girih.__all__)
    for name in girih.__all__:
        assert getattr(girih, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="EmbeddingBagg"):
        getattr(girih, "EmbeddingBagg")  # noqa: B009


def test_import_loads_neither_torch_nor_numba():
    code = "import sys, girih; sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_is_that_of_the_installation():
    assert girih.__version__ == version("girih")


def test_reading_a_config_needs_no_package_that_writes_toml(tmp_path):
    """Machines without a network may lack it, and most commands only read."""
    (tmp_path / "config.toml").write_text("[data]\n")
    code = (
        "import sys; sys.modules['tomli_w'] = None; import girih.data.guessing, girih.cli.train, pathlib;"
        "from girih.config.sections import read_toml; print(read_toml(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "config.toml")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "{'data': {}}\n"
