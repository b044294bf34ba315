"""Exports, checkpoints and run directories are data: whatever they hold, with correct checksums, none of it runs."""

import copy
import json
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import girih
from girih import cli
from girih.checkpoint import Manifest, find
from girih.config import read_toml, write_toml
from girih.config.user_code import RECORD
from girih.errors import CheckpointError, ConfigError
from girih.models.zoo import description_of, from_recipe
from girih.serving.model_directory import open_served
from girih.serving.signature import ModelFile, Signature
from models.zoo_cases import OPTIONS, features_for, required

MINE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, schema, width=3):
        super().__init__()
        self.schema, self.net = schema, nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.scale = torch.tensor([2.0])

    def forward(self, numeric, embeddings):
        hidden = self.net(embeddings.concatenated(["user", "item"]))
        hidden += numeric.sum(1, keepdim=True).expand(numeric.shape[0], 1)
        return hidden * self.scale
"""
EVIL = "import pathlib\npathlib.Path({marker!r}).touch()\n" + MINE.replace("Mine", "M")


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture(scope="module")
def home(log_source, tmp_path_factory):
    """A finished run of a user's class, ``run``, of one of girih's, ``zoo``, and their exports; only read."""
    path = tmp_path_factory.mktemp("home")
    shutil.copytree(log_source, path, dirs_exist_ok=True)
    (path / "mine.py").write_text(MINE)
    model = "model={name='mine.py:Mine', width=5}"
    assert run("train", path / "config.toml", "--run", path / "run", "--set", model, "train.max_steps=3") == 0
    assert run("train", path / "config.toml", "--run", path / "zoo", "--set", "train.max_steps=3") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("girih.serving.program.missing_for_onnx", lambda: "onnxscript")
        assert run("export", path / "run", "--out", path / "own_export") == 0
        assert run("export", path / "zoo", "--out", path / "zoo_export") == 0
    return path


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A file of Python, importable as ``evil_module`` too, which leaves a file ``ran``."""
    for name in ("evil", "evil_module"):
        (tmp_path / f"{name}.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def sealed(source, directory, *, graph=None, tensors=None, **changes):
    """A copy of an export with another ``dense.json`` or other tensors, its checksums correct."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    signature = Signature.read(directory)
    if graph is not None:
        (directory / "dense.json").write_text(graph if isinstance(graph, str) else json.dumps(graph))
    if tensors is not None:
        save_file(tensors, directory / "dense.safetensors")
    kinds = ("parameters", "program", "onnx")
    files = {kind: file for kind in kinds if (file := getattr(signature.dense, kind)) is not None}
    files = {kind: ModelFile.of(directory / file.name) for kind, file in files.items()}
    replace(signature, dense=replace(signature.dense, **files), **changes).write(directory)
    return directory


def test_an_export_of_a_users_class_holds_no_pickle_and_answers_without_its_code(home, tmp_path):
    path = sealed(home / "own_export", tmp_path / "export")
    assert sorted(each.name for each in path.iterdir()) == [
        "dense.json", "dense.safetensors", "rows-0.safetensors", "signature.json",
    ]  # fmt: skip
    content = json.loads((path / "dense.json").read_text())
    names = {name for name, _, _ in content["nodes"]}
    assert {"aten.linear.default", "aten.add.Tensor"} <= names
    assert "scale" in load_file(path / "dense.safetensors")
    for name in ("dense.pt2", "model.pt", "dense.pkl"):  # which nobody opens
        (path / name).write_bytes(pickle.dumps(pytest.fail))
    open_served(path)


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "builtins.eval", "torch.load", "aten.from_file.default", "aten.set_.source_Tensor", "aten.add_.Tensor",
        "aten.as_strided.default", "aten.empty.memory_format", "aten.resize_.default", "aten.randn.default",
        "aten._native_batch_norm_legit.no_stats", "aten._local_scalar_dense.default", "operator.attrgetter",
        "operator.methodcaller", "operator.pow", "operator.__mul__", "aten.__class__.__init__", "aten.linear", "aten.linear.out",
        "prim.device.default", "aten.linear.__call__", "aten.max_pool2d_with_indices_backward.default", "", "aten..", 7, None, ["aten"],
    ],
)  # fmt: skip
def test_an_operator_that_files_may_not_name_is_refused_before_anything_runs(home, tmp_path, name, evil):
    graph = json.loads((home / "own_export" / "dense.json").read_text())
    graph["nodes"].insert(0, [name, [f"text:touch {evil / 'ran'}"], {}])
    reason = "is not one that files may name" if isinstance(name, str) else ""
    with pytest.raises(CheckpointError, match=rf"dense\.json: damaged: .*{reason}.*export the model again"):
        open_served(sealed(home / "own_export", tmp_path / "export", graph=graph))


def crafted(graph, marker):
    """Graphs that name what they may, and are still none, or would fill memory, or never end."""
    last, nodes = graph["output"], len(graph["nodes"])
    step = len(graph["tensors"]) + graph["inputs"] + nodes
    linear = next(n for n, node in enumerate(graph["nodes"]) if node[0] == "aten.linear.default")

    def added(*more, **changes):
        return graph | {"nodes": [*graph["nodes"], *more], "output": step + len(more) - 1} | changes

    def changed(number, node):
        return graph | {"nodes": [*graph["nodes"][:number], node, *graph["nodes"][number + 1 :]]}

    yield "full", added(["aten.full.default", [[10**6, 10**6], 1.0], {}])
    yield "repeat", added(["aten.repeat.default", [f"node:{last}", [10**9, 10**3]], {}])
    yield (
        "expand",
        added(
            ["aten.full.default", [[1], 1.0], {}],
            ["aten.expand.default", [f"node:{step}", [1 << 40]], {}],
            ["aten.clone.default", [f"node:{step + 1}"], {}],
        ),
    )
    yield "lists", added(["operator.mul", [[0, 0], 10**12], {}])
    yield "texts", added(["operator.mul", ["text:a", 10**12], {}])
    yield (
        "powers",
        added(*(["operator.mul", [f"node:{step + n - 1}" if n else 10] * 2, {}] for n in range(60))),
    )
    yield "trunc", added(["aten.div.Tensor_mode", ["node:0", "node:0"], {"rounding_mode": "text:trunc"}])
    yield (
        "repeats",
        added(
            ["aten.full.default", [[4], 1 << 62], {"dtype": "dtype:int64"}],
            ["aten.repeat_interleave.Tensor", [f"node:{step}"], {"output_size": 0}],
        ),
    )
    yield (
        "embedding",
        added(
            ["aten.full.default", [[4], 1 << 62], {"dtype": "dtype:int64"}],
            ["aten.embedding.default", [f"node:{linear}", f"node:{step}"], {}],
        ),
    )
    yield (
        "batch norm",
        added(
            ["aten.full.default", [[8, 100_000], 1.0], {}],
            [
                "aten._native_batch_norm_legit_no_training.default",
                [f"node:{step}", *[f"node:{linear}"] * 4, 0.1, 1e-5],
                {},
            ],
        ),
    )
    yield "text", added(["aten.gelu.default", [f"node:{last}"], {"approximate": "text:__import__('os')"}])
    yield "shape", added(["aten.unsqueeze.default", [f"node:{last}", 0], {}])
    yield "type", added(["aten._to_copy.default", [f"node:{last}"], {"dtype": "dtype:float64"}])
    yield "number", added(["aten.sym_size.int", ["node:0", 0], {}])
    yield "later", changed(0, ["aten.linear.default", [f"node:{step}"], {}])
    yield "itself", changed(0, ["aten.relu.default", [f"node:{step - nodes}"], {}])
    for reference in (
        "node:-1",
        "node:1e3",
        "node:",
        "node:99999999999999999999",
        "dtype:system",
        "code:x",
        "nod",
    ):
        yield reference, changed(0, ["aten.relu.default", [reference], {}])
    yield "mapping", changed(0, ["aten.relu.default", [{"a": "node:0"}], {}])
    yield "kwargs", changed(0, ["aten.relu.default", ["node:0"], {"self": "node:0"}])
    code = f"self=1)\nopen({marker!r}, 'w')\ndict(x"  # as part of a function's source it would run
    for name in ("aten.relu.default", "aten.linear.default", "operator.getitem", "operator.mul"):
        yield f"code {name}", changed(0, [name, ["node:0"], {code: 1}])
    yield "deep", json.dumps(graph)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    yield "arguments", changed(0, ["aten.relu.default", json.loads("[" * 900 + "]" * 900), {}])
    for key, value in (
        ("inputs", -1), ("inputs", 10**9), ("inputs", True), ("output", -1), ("output", 10**9), ("output", None),
        ("parameters", ["x"]), ("parameters", 10**9), ("tensors", 5), ("tensors", ["../signature"]), ("nodes", {}), ("nodes", [[]]), ("nodes", None),
    ):  # fmt: skip
        yield f"{key} {value}", graph | {key: value}
    for value in ("[]", "null", "{}", "1", "\x00", ""):
        yield value, value


def test_a_graph_that_is_none_is_refused_in_one_line(home, tmp_path, evil):
    graph, count = json.loads((home / "own_export" / "dense.json").read_text()), 0
    for name, content in crafted(copy.deepcopy(graph), str(evil / "ran")):
        path = sealed(home / "own_export", tmp_path / "export", graph=content)
        with pytest.raises(CheckpointError, match=r"^[^\n]*dense\.json: damaged: [^\n]*$"):
            pytest.fail(f"{name}: {open_served(path)}")
        count += 1
    assert count > 40
    open_served(sealed(home / "own_export", tmp_path / "export", graph=graph))


def test_a_graph_with_a_key_twice_or_nan_is_refused(home, tmp_path):
    text = (home / "own_export" / "dense.json").read_text()
    for value in ('"output": 0', '"more": NaN'):
        path = sealed(home / "own_export", tmp_path / value[1:5], graph=text.replace("{", f"{{{value}, ", 1))
        with pytest.raises(CheckpointError, match=r"(is there|occurs) twice|is not finite"):
            open_served(path)


def test_a_graph_that_would_fill_memory_is_refused_before_it_does(home, tmp_path):
    graph = json.loads((home / "own_export" / "dense.json").read_text())
    for node in (
        ["aten.full.default", [[1 << 15, 1 << 14], 1.0], {}],
        ["aten.repeat.default", ["node:0", [1 << 14, 1 << 14]], {}],
        ["aten.arange.start_step", [0, 1 << 29, 1], {}],
    ):
        path = sealed(
            home / "own_export", tmp_path / "export", graph=graph | {"nodes": [*graph["nodes"], node]}
        )
        with pytest.raises(CheckpointError, match="results of more than 268,435,456 elements"):
            open_served(path)


def test_tensors_of_other_shapes_or_types_are_refused(home, tmp_path):
    tensors = load_file(home / "own_export" / "dense.safetensors")
    name = "net.0.weight"
    for other in (
        torch.ones(3),
        torch.ones(5, 8, dtype=torch.int64),
        torch.ones(0, 8),
        torch.ones(5, 9),
        None,
    ):
        changed = {key: each for key, each in tensors.items() if key != name}
        if other is not None:
            changed[name] = other
        with pytest.raises(CheckpointError, match="export the model again"):
            open_served(sealed(home / "own_export", tmp_path / "export", tensors=changed))


def evil_names(evil):
    return [
        f"{evil / 'evil.py'}:M",
        "evil.py:M",
        "evil_module:M",
        "os:system",
        "DeepFM",
        "nn.Linear",
        ["deepfm"],
        None,
        {},
    ]


def test_a_recipe_in_an_export_names_no_code(home, tmp_path, evil, monkeypatch, capsys):
    monkeypatch.chdir(evil)
    recipe = dict(Signature.read(home / "zoo_export").recipe)
    for name in evil_names(evil):
        described = recipe | {"model": {"name": name, "options": {}}}
        path = sealed(home / "zoo_export", tmp_path / "export", recipe=described)
        with pytest.raises(CheckpointError, match="its recipe is damaged"):
            open_served(path)
    path = sealed(
        home / "zoo_export",
        tmp_path / "export",
        recipe=recipe | {"model": {"name": "evil_module:M", "options": {}}},
    )
    capsys.readouterr()
    assert run("serve", path, "--port", 0) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_recipe_in_a_checkpoint_names_no_code(home, tmp_path, evil, monkeypatch):
    monkeypatch.chdir(evil)
    shutil.copytree(home / "zoo" / "checkpoints", tmp_path / "checkpoints")
    place = find(tmp_path / "checkpoints")
    manifest = Manifest.read(place)
    for name in evil_names(evil)[:-2]:
        recipe = manifest.recipe | {"model": {"name": name, "options": {}}}
        replace(manifest, recipe=recipe).write(place)
        with pytest.raises(CheckpointError, match="its recipe is damaged"):
            girih.load(tmp_path / "checkpoints")


HUGE = ([10**9, 10**9], [40_000, 40_000], [10**30], [1] * 10_000, "x", [[8]], [-1], [1e400])


@pytest.mark.parametrize("hidden", HUGE[:-1], ids=str)  # JSON holds no infinity
def test_a_recipe_of_other_tensors_is_refused_before_memory_is_taken(home, tmp_path, hidden):
    recipe = dict(Signature.read(home / "zoo_export").recipe)
    described = {"name": "deepfm", "options": {"hidden": hidden}}
    with pytest.raises(CheckpointError, match="its recipe is damaged"):
        open_served(sealed(home / "zoo_export", tmp_path / "export", recipe=recipe | {"model": described}))


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_model_is_made_from_its_recipe(name):
    schema = girih.Schema(features_for(name), ["click", "like"] if name in ("mmoe", "esmm") else ["click"])
    model = girih.models.create(name, schema, {**OPTIONS[name], **required(name, schema)})
    described, tensors = description_of(model), model.state_dict()
    made = from_recipe(described, schema, tensors, "here")
    assert {key: (each.shape, each.device) for key, each in made.state_dict().items()} == {
        key: (each.shape, each.device) for key, each in tensors.items()
    }
    for option in described["options"]:
        for value in HUGE:
            with pytest.raises(CheckpointError, match="here: its recipe is damaged"):
                from_recipe(
                    described | {"options": described["options"] | {option: value}}, schema, tensors, "here"
                )


def predicted(run_path, home, out, *words):
    assert run("predict", run_path, "--data", home / "test.parquet", "--out", out, *words) == 0
    return pq.read_table(out)["prediction"].to_numpy()


@pytest.fixture
def copied(home, tmp_path):
    """A copy of the run of a user's class, elsewhere, which may be changed."""
    shutil.copytree(home / "run", tmp_path / "copied")
    return tmp_path / "copied"


def test_a_copy_of_a_run_works_while_its_record_matches_and_else_asks_for_the_class(
    home, copied, tmp_path, capsys
):
    mine = f"{home / 'mine.py'}:Mine"
    expected = predicted(home / "run", home, tmp_path / "out.parquet")
    np.testing.assert_array_equal(predicted(copied, home, tmp_path / "out.parquet"), expected)
    assert run("evaluate", copied) == 0
    (copied / RECORD).unlink()
    commands = (
        ("predict", copied, "--data", home / "test.parquet", "--out", tmp_path / "out.parquet"), ("evaluate", copied),
        ("export", copied, "--out", tmp_path / "export"), ("train", copied / "config.toml", "--run", copied, "--resume"),
        ("check", copied / "config.toml"), ("serve", copied, "--port", "0"),
    )  # fmt: skip
    for words in commands:
        capsys.readouterr()
        assert run(*words) == 2, words
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        assert told.endswith("; give --model file.py:Class\n"), told
    for command in ("check", "plan"):
        assert run(command, copied / "config.toml") == 2
        assert capsys.readouterr().err.endswith("; give --model file.py:Class\n")
        assert run(command, copied / "config.toml", "--model", mine) == 0
    capsys.readouterr()
    assert run("serve", home / "own_export", "--model", mine, "--port", 0) == 2
    assert "is an export, which needs no class; leave it out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give --model"):
        girih.load(copied)
    np.testing.assert_array_equal(
        predicted(copied, home, tmp_path / "out.parquet", "--model", mine), expected
    )
    assert run("evaluate", copied, "--model", mine) == 0
    assert run("export", copied, "--out", tmp_path / "export", "--model", mine) == 0
    table = pq.read_table(home / "test.parquet")
    for place in (copied, copied / "checkpoints"):  # options are those of the config, and of the recipe
        with girih.load(place, model=mine) as model:
            np.testing.assert_array_equal(model.predict(table), expected)
    words = ("train", copied / "config.toml", "--run", copied, "--resume", "--set", "train.max_steps=5")
    assert run(*words, "--model", mine) == 0
    assert run("evaluate", copied) == 0  # which the argument allowed from then on


def test_the_config_of_a_run_names_no_other_class(home, copied, evil, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(copied)
    shutil.copy(evil / "evil.py", copied / "evil.py")
    shutil.copy(evil / "evil.py", copied / "inside.py")
    (evil / "link.py").symlink_to(copied / "evil.py")
    (copied / "out.py").symlink_to(evil / "evil.py")
    settings = read_toml(copied / "config.toml")
    mine = settings["model"]["name"]
    names = [
        copied / "evil.py", "evil.py", "../evil.py", evil / "evil.py", evil / "link.py", copied / "out.py", mine.replace("mine.py:Mine", "mine.py"),
    ]  # fmt: skip
    names = [f"{name}:M" for name in names] + [
        "evil_module:M",
        "inside:M",
        "os:system",
        "no.such:M",
        ":M",
        "x:",
    ]
    for name in names:
        write_toml(copied / "config.toml", settings | {"model": {"name": name}})
        capsys.readouterr()
        assert run("evaluate", ".") == 2, name
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        assert "a run directory may only name a class that your own config named" in told
        with pytest.raises(ConfigError, match="give --model"):
            girih.load(copied)
    write_toml(copied / "config.toml", settings | {"strategy": {"name": f"{evil / 'evil.py'}:M"}})
    assert run("train", "config.toml", "--run", ".", "--resume", "--set", "train.max_steps=9") == 2
    assert "give --set strategy.name=file.py:Class" in capsys.readouterr().err
    assert str(copied) not in sys.path


def test_a_record_of_another_user_or_of_another_section_is_none(home, copied, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # another user's
        assert run("evaluate", copied) == 2
    record = json.loads((copied / RECORD).read_text())
    assert list(record) == ["model"]
    for content in ({"strategy": record["model"]}, {"model": 5}, [], 7, {"model": record["model"][:-1]}):
        (copied / RECORD).write_text(json.dumps(content))
        assert run("evaluate", copied) == 2
    (copied / RECORD).write_text("[" * 100_000)
    capsys.readouterr()
    assert run("evaluate", copied) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_in_the_library_reads_a_pickle_from_a_file_or_evaluates_text():
    banned = re.compile(
        r"torch\.load\(|export\.load\(|jit\.load\(|allow_pickle|pickle\.load\(|Unpickler|joblib|yaml\.load|read_pickle"
        r"|(?<![.\w])(eval|exec)\("
    )
    sources = sorted(Path(girih.__file__).parent.rglob("*.py"))
    assert len(sources) > 300
    assert [str(file) for file in sources if banned.search(file.read_text())] == []
    loads = [file.name for file in sources if "pickle.loads(" in file.read_text()]
    assert loads == ["child.py"]  # a process reads what its parent sends through a private pipe
