"""Small generated data that many tests share."""

import gc
import importlib.util
import logging
import os
import shutil
import sys
import uuid
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [TESTS, os.environ.get("PYTHONPATH")])
)  # processes import support
gc.disable()  # until all modules are imported; see pytest_collection

from girih.data.click_log import click_log  # noqa: E402

CONFIG = """
[data]
train = "train.parquet"
valid = "valid.parquet"
test = "test.parquet"
batch_size = 128
shuffle_rows = 1000

[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[features]]
name = "tags"
kind = "categorical"
dim = 4
[[features]]
name = "x0"
kind = "numeric"
transform = ["log1p", "standardize"]

[labels]
names = ["click"]

[model]
name = "deepfm"
hidden = [16, 8]
dropout = 0.1

[sparse_optimizer]
name = "adam"
lr = 0.01

[first_order_optimizer]
name = "ftrl"

[dense_optimizer]
name = "adam"
lr = 0.003

[train]
seed = 3
log_every_steps = 5
"""


NEED_TORCH = [
    "checkpoint/test_checkpoint_background.py",
    "checkpoint/test_checkpoint_save.py",
    "checkpoint/test_checkpoint_trees.py",
    "checkpoint/test_crafted.py",
    "checkpoint/test_failed_load.py",
    "checkpoint/test_places.py",
    "checkpoint/test_prune.py",
    "checkpoint/test_runs_on_s3.py",
    "checkpoint/test_trainers_save.py",
    "comm/test_exchange.py",
    "comm/test_group.py",
    "comm/test_pinned.py",
    "comm/test_tensor_codecs.py",
]
"""Files left out without torch, in folders whose other tests run there: see ``make test-newest``."""
collect_ignore = NEED_TORCH if importlib.util.find_spec("torch") is None else []
WHOLE_RUNS = ("checkpoint", "cli", "docs", "publishing", "serving", "strategies")
_CHECKED = {}  # kernel → types by which it was compiled before the test at hand


def pytest_configure(config):
    """Has Triton interpret kernels for GPUs if there is no GPU, before anything imports it. Other tests may run without torch."""
    marks = config.getoption("markexpr", "")
    if "not gpu" in marks or importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if "smoke" in marks:
        import gpu_kernels

        config.pluginmanager.register(gpu_kernels)


def pytest_sessionstart(session):
    """Compiles all kernels before several workers begin: each would compile those that its own tests call."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return
    from girih.kernels.cpu import ahead

    ahead.make_ready(ahead.KERNELS, session.config.get_terminal_writer().line)


def pytest_ignore_collect(collection_path, config):
    """Leaves alone whatever is not asked for: importing all tests takes a process half a minute, and those of GPUs load Triton."""
    asked = config.getoption("markexpr", "")
    if "gpu" not in asked:
        return None
    if "not gpu" in asked:
        return True if collection_path.is_dir() and collection_path.name == "gpu" else None
    others = collection_path.name.startswith("test_") and collection_path.parent.name != "gpu"
    return True if others and collection_path.is_file() else None


def pytest_collection_modifyitems(items):
    """Files of whole runs begin first, so that no worker has one left when all others are done; folders mark tests of GPUs."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")
    items.sort(key=lambda item: item.path.parent.name not in WHOLE_RUNS)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:  # by default it ignores tl.device_assert, which checks alignment
        options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects garbage from here on: while modules were imported, each collection would have looked through all of them."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """What is there already is left out when a trainer that closes collects garbage: 0.3 s each time otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _kernels_are_called_as_annotated():
    """By types that ahead.py knows; others would be compiled amid a step."""
    yield
    if "girih.kernels.cpu.jit" not in sys.modules:
        return
    from girih.kernels.cpu import ahead

    for name, kernel in ahead.KERNELS.items():
        found, checked = kernel.dispatcher.overloads, _CHECKED.setdefault(name, set())
        if len(found) != len(checked):
            new, _CHECKED[name] = set(found) - checked, set(found)
            assert new <= set(ahead.signatures(kernel)), name


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    """The directory of the user's key, for this session alone."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def log_source(tmp_path_factory):
    """A directory with train (3,000 rows), valid and test (1,000 each) as Parquet, and config.toml; only read."""
    directory, start = tmp_path_factory.mktemp("log"), 0
    for name, rows in (("train", 3000), ("valid", 1000), ("test", 1000)):
        table, _ = click_log(rows, start=start, cardinality=500)
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=700)
        start += rows
    (directory / "config.toml").write_text(CONFIG)
    return directory


@pytest.fixture
def log_directory(log_source, tmp_path):
    """A copy of it that may be changed: ``tmp_path``."""
    shutil.copytree(log_source, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def torch():
    """The module, for tests in files that others of need no torch; they are skipped where it is not installed."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def public_data():
    """The directory of public data sets; the test is skipped where it is missing."""
    path = Path(os.environ.get("GIRIH_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no public data at {path}; set GIRIH_DATA")
    return path


@pytest.fixture(scope="session")
def s3_server():
    """Starts an S3 server with a bucket ``girih``, to which fsspec and the processes of a test go."""
    missing = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; pip install 'girih[dev]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "any")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files = fsspec.filesystem("s3", use_listings_cache=False)
        files.mkdir("girih")
        yield files
        type(files).clear_instance_cache()
    server.stop()


@pytest.fixture
def s3_address(s3_server):
    """Of a run, empty."""
    return f"s3://girih/{uuid.uuid4().hex}"
