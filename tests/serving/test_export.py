"""``girih export``: a directory that needs no checkpoint, whole or not at all, and what is damaged in it told."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import girih
from companions import killed, ran
from girih import cli
from girih.checkpoint import Manifest, Storage
from girih.config import plain, write_toml
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import seal_text, sealed_text
from girih.schema import Categorical, Numeric, Schema, Sequence
from girih.serving.cached import EXPORTED, exported
from girih.serving.model_directory import open_served
from girih.serving.opening import final_weights
from girih.serving.program import inputs_of, missing_for_onnx
from girih.serving.reading import RequestReader
from girih.serving.served import ModelVersion
from girih.serving.signature import NAME, Signature
from girih.store import Keys
from girih.store.mapped import MappedFile, MappedWriter
from serving.serving_site import tensors_of
from support.resealing import seal

COLUMNS = ["user", "item", "tags", "x0"]


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(log_source, tmp_path_factory):
    """A finished run; only read."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = ("store.shards=2", "train.max_steps=9")
    assert run("train", log_source / "config.toml", "--run", path, "--set", *words) == 0
    return path


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """Its export; only read."""
    path = tmp_path_factory.mktemp("made") / "model"
    assert run("export", trained, "--out", path) == 0
    return path


@pytest.fixture
def no_onnx(monkeypatch):
    """For tests of other files than ``dense.onnx``, which takes most of an export."""
    monkeypatch.setattr("girih.serving.program.missing_for_onnx", lambda: "onnxscript")


def predicted(run_path, data, out):
    assert run("predict", run_path, "--data", data, "--out", out) == 0
    table = pq.read_table(out)
    return np.stack([table[name].to_numpy() for name in table.column_names], axis=1)


def answers(directory, table, size):
    """Predictions of an exported model, in requests of so many examples."""
    _, served = open_served(directory)
    reader = RequestReader(served.schema, size)
    parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
    return np.concatenate([served.predict(reader.read(tensors_of(part))) for part in parts])


def test_the_directory_says_what_it_holds_and_holds_it(made, trained):
    content = json.loads((made / NAME).read_text())
    assert [each["name"] for each in content["inputs"]] == ["user", "item", "tags", "x0"]
    assert [each["datatype"] for each in content["inputs"]] == ["INT64", "INT64", "INT64", "FP32"]
    assert content["outputs"] == [{"name": "prediction", "label": "click", "loss": "bce", "datatype": "FP32"}]
    manifest = Manifest.read(final_weights(trained)[0])
    assert (content["step"], content["fingerprint"], content["name"]) == (9, manifest.fingerprint, "run")
    assert content["girih"] == manifest.girih
    signature = Signature.read(made)
    assert set(os.listdir(made)) == {NAME, *(file.name for file in signature.files)}
    for each in signature.files:
        assert (made / each.name).stat().st_size == each.bytes
    (((rows_file,),),) = (signature.rows,)
    assert (rows_file.name, rows_file.rows) == ("rows-0.safetensors", sum(manifest.rows.values()))
    file = MappedFile(made / "rows-0.safetensors", rows_file.facts)
    with girih.load(trained) as model:
        users = model.table("user")
    ids, tables, rows = (np.concatenate(parts) for parts in zip(*file.chunks(), strict=True))
    own = tables == 0
    order = np.argsort(ids[own])
    np.testing.assert_array_equal(ids[own][order], users.ids)
    np.testing.assert_array_equal(rows[own][order][:, :4], users.rows)
    parameters = load_file(made / "dense.safetensors")
    assert set(parameters) == set(model.model.state_dict())


def test_answers_are_those_of_predict_without_the_run(made, trained, log_source, tmp_path):
    expected = predicted(trained, log_source / "test.parquet", tmp_path / "out.parquet")
    table = pq.read_table(log_source / "test.parquet").select(COLUMNS)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(made, elsewhere)
    np.testing.assert_array_equal(answers(elsewhere, table, 128), expected)


@pytest.mark.skipif(missing_for_onnx() is not None, reason="onnx is not installed")
def test_a_runtime_that_is_not_torch_computes_the_same(made, log_source):
    onnxruntime = pytest.importorskip("onnxruntime")
    _, served = open_served(made)
    session = onnxruntime.InferenceSession(str(made / "dense.onnx"), providers=["CPUExecutionProvider"])
    for size in (1, 128):
        table = pq.read_table(log_source / "test.parquet").select(COLUMNS).slice(0, size)
        batch = served.normalization.apply(RequestReader(served.schema, 200).read(tensors_of(table)))
        embeddings = served._sparse.peek(batch).wait()
        names = ["numeric", *(each["name"] for each in inputs_of(embeddings))]
        given = dict(zip(names, (batch.numeric, *(t.numpy() for t in embeddings.tensors())), strict=True))
        wanted = {each.name for each in session.get_inputs()}  # what the net does not read is left out
        (logits,) = session.run(["logits"], {name: given[name] for name in given if name in wanted})
        np.testing.assert_allclose(
            logits, served.dense.predict(batch, embeddings).numpy(), rtol=1e-4, atol=1e-6
        )


def test_without_onnx_one_line_says_so(trained, tmp_path, no_onnx, capsys):
    assert run("export", trained, "--out", tmp_path / "model", "--name", "clicks") == 0
    told = capsys.readouterr()
    assert told.err == "no dense.onnx: onnxscript is not installed; pip install 'girih[onnx]'\n"
    assert told.out.startswith("clicks, step 9: ")
    assert "dense.onnx" not in os.listdir(tmp_path / "model")


RICH = [
    Categorical(name="user", dim=4, table="people"),
    Categorical(name="friend", dim=4, table="people"),
    Categorical(name="word", dim=4),
    Categorical(name="tags", dim=4, weights="tag_weights", pooling="sum", max_length=3),
    Categorical(name="genres", dim=4, separator="|", pooling="sqrtn"),
    Categorical(name="age", dim=4, column="years", bucketize=(18.0, 30.5, 60.0)),
    Categorical(name="hour", dim=4, column="moment", transform="hour"),
    Sequence(name="seen", dim=4, table="people", max_length=4),
    Numeric(name="weekday", column="moment", transform="weekday"),
    Numeric(name="price", transform=("log1p", "standardize")),
    Numeric(name="years"),
]


def rich(rows, seed, labels=()):
    rng = np.random.default_rng(seed)
    tags = rng.integers(0, 6, rows)
    words = np.array(["a", "7", "007", "höhe", "", "x" * 50, "7.0"])
    columns = {
        "user": rng.integers(-9, 9, rows),
        "friend": rng.integers(0, 99, rows).astype(np.uint16),
        "word": pa.array(words[rng.integers(0, len(words), rows)]),
        "tags": [rng.integers(0, 5, n).tolist() for n in tags],
        "tag_weights": [rng.random(n).astype(np.float32).tolist() for n in tags],
        "genres": pa.array(["|".join(map(str, rng.integers(0, 4, n))) for n in rng.integers(0, 4, rows)]),
        "years": rng.uniform(0, 90, rows),
        "moment": rng.integers(1_600_000_000, 1_700_000_000, rows),
        "seen": [rng.integers(0, 99, n).tolist() for n in rng.integers(0, 9, rows)],
        "price": rng.exponential(5, rows).astype(np.float32),
    }
    return pa.table(columns | {label: rng.random(rows).astype(np.float32) for label in labels})


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory):
    """A run with strings, weights, transforms, shared tables, 16-bit rows, a sequence and two labels of two losses; and new data."""
    path = tmp_path_factory.mktemp("rich")
    schema = Schema(
        RICH,
        girih.Labels(names=("click", "stay"), loss={"stay": "mse"}),
        [girih.Table(name="word", dtype="float16")],
    )
    for name, seed in (("train", 1), ("new", 2)):
        pq.write_table(
            rich(300, seed, ("click", "stay") if name == "train" else ()), path / f"{name}.parquet"
        )
    described = {key: plain(value) for key, value in schema.to_dict().items()}
    described["tables"] = [table for table in described["tables"] if table["name"] in ("word", "people")]
    write_toml(
        path / "config.toml",
        {
            "data": {"train": "train.parquet", "batch_size": 100},
            **described,
            "model": {"name": "dnn", "hidden": [8], "batch_norm": True},
            "train": {"seed": 5},
        },
    )
    assert run("train", path / "config.toml", "--run", path / "run") == 0
    return path


def test_strings_weights_times_transforms_and_two_labels_answer_as_predict_does(rich_run, tmp_path):
    expected = predicted(rich_run / "run", rich_run / "new.parquet", tmp_path / "out.parquet")
    assert expected.shape == (300, 2)
    assert run("export", rich_run / "run", "--out", tmp_path / "model") == 0
    table = pq.read_table(rich_run / "new.parquet")
    np.testing.assert_array_equal(answers(tmp_path / "model", table, 100), expected)
    outputs = Signature.read(tmp_path / "model").outputs
    assert [(each.name, each.loss) for each in outputs] == [
        ("prediction_click", "bce"),
        ("prediction_stay", "mse"),
    ]
    inputs = {each.name: each for each in Signature.read(tmp_path / "model").inputs}
    assert {name: each.kind for name, each in inputs.items() if each.kind != "ids"} == {
        "tag_weights": "weights", "years": "numbers", "moment": "times", "price": "numbers",
    }  # fmt: skip
    assert inputs["years"].features == ("age", "years")
    assert [name for name, each in inputs.items() if each.sequence] == ["tags", "seen", "tag_weights"]


OWN = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self, schema, width=3):
        super().__init__()
        self.schema, self.net = schema, nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("count", torch.zeros(1))

    def masked(self, vectors, numeric):
        with torch.no_grad():
            scale = torch.zeros(vectors.shape[0] * 2).view(-1, 2)
            scale[:, 0] += vectors[numeric[:, 0] > 0].shape[1]
        weights = vectors.masked_fill(vectors > 1, float("-inf")).softmax(1)
        return (weights[:, :1] * 2).mul_(scale[:, :1])

    def forward(self, numeric, embeddings):
        return self.net(embeddings.concatenated(["user", "item"])) {more}
"""


@pytest.fixture
def own_run(log_directory, monkeypatch):
    """Trains a class of the user's own, whose forward ends as the argument says."""

    def trained(more=""):
        (log_directory / "mine.py").write_text(OWN.format(more=more))
        words = ("model={name='mine.py:Mine'}", "train.max_steps=5")
        assert (
            run("train", log_directory / "config.toml", "--run", log_directory / "run", "--set", *words) == 0
        )
        return log_directory / "run"

    return trained


def test_a_class_of_the_users_is_served_without_its_code(own_run, log_directory, tmp_path, no_onnx):
    path = own_run()
    expected = predicted(path, log_directory / "test.parquet", tmp_path / "out.parquet")
    assert run("export", path, "--out", tmp_path / "model") == 0
    (log_directory / "mine.py").unlink()
    table = pq.read_table(log_directory / "test.parquet").select(COLUMNS)
    np.testing.assert_array_equal(answers(tmp_path / "model", table, 128), expected)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("* (1 if float(numeric.sum()) > 0 else 2)", ""),
        ("* torch.rand(1)", "the operator aten.rand.default cannot be served"),
        ("+ self.count.add_(1)", "its forward changes buffers or inputs"),
    ],
)
def test_a_class_that_cannot_be_exported_is_refused_in_one_line(own_run, tmp_path, capsys, more, reason):
    path = own_run(more)
    capsys.readouterr()
    assert run("export", path, "--out", tmp_path / "model") == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith(
        f"girih: Mine: your class is served in the form of torch.export, which failed: {reason}"
    )
    assert "Traceback" not in told
    assert NAME not in os.listdir(tmp_path / "model")


def test_what_usual_networks_compute_is_served(own_run, log_directory, tmp_path, no_onnx):
    """Regions without gradients, operators in place, indices by a mask, and numbers of examples in sizes."""
    more = "+ self.masked(embeddings.concatenated(['user', 'item']), numeric)"
    path = own_run(more)
    expected = predicted(path, log_directory / "test.parquet", tmp_path / "out.parquet")
    assert run("export", path, "--out", tmp_path / "model") == 0
    table = pq.read_table(log_directory / "test.parquet").select(COLUMNS)
    np.testing.assert_array_equal(answers(tmp_path / "model", table, 128), expected)


def test_a_new_version_on_top_hides_rows_and_buries_keys(made, log_source, tmp_path):
    _, served = open_served(made)
    (stack,) = served.stacks
    ids, tables, rows = next(stack.files[0].chunks())
    with MappedWriter(tmp_path / "newer", stack.spec, 2 * len(ids)) as writer:
        writer.bury(ids[::2], tables[::2])
        writer.add(ids[1::2], tables[1::2], rows[1::2] + 1)
        facts = writer.finish()
    newer = served.with_files([[MappedFile(tmp_path / "newer", facts), *stack.files]], ModelVersion(9, 1))
    assert (str(served.version), str(newer.version)) == ("9", "9.1")
    out = np.empty((len(ids), stack.spec.dim), np.float32)
    newer.stacks[0].peek(Keys(ids, tables), out)
    np.testing.assert_array_equal(out[1::2], rows[1::2] + 1)
    assert (served.stacks[0].peek(Keys(ids, tables), out) == 0).all()
    np.testing.assert_array_equal(out, rows)
    table = pq.read_table(log_source / "test.parquet").select(COLUMNS).slice(0, 64)
    batch = RequestReader(served.schema, 200).read(tensors_of(table))
    assert not np.allclose(newer.predict(batch), served.predict(batch))


def test_the_output_directory_is_refused_unless_it_is_empty_or_an_export_cut_short(
    trained, made, tmp_path, no_onnx, capsys
):
    out = tmp_path / "model"
    out.mkdir()
    (out / "rows-0.safetensors").write_text("half")
    (out / ".rows-1.safetensors.unfinished").write_text("half")
    assert run("export", trained, "--out", out) == 0
    capsys.readouterr()
    assert run("export", trained, "--out", out) == 2
    assert "not empty (it holds an exported model)" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    assert run("export", trained, "--out", tmp_path / "notes") == 2
    assert "not empty (it holds mine.txt)" in capsys.readouterr().err
    assert os.listdir(tmp_path / "notes") == ["mine.txt"]
    assert run("export", trained, "--out", tmp_path / "notes" / "mine.txt") == 2
    assert "is a file" in capsys.readouterr().err
    assert run("export", tmp_path / "none", "--out", tmp_path / "other") == 2


def test_a_name_that_no_path_can_hold_is_refused(trained, made, tmp_path, capsys):
    for words in (["export", trained, "--out", tmp_path / "out"], ["serve", made, "--port", 0]):
        assert run(*words, "--name", "ads/clicks") == 2
        told = capsys.readouterr().err
        assert (
            told
            == "girih: --name 'ads/clicks': expected a name without slashes, as clients ask for /v2/models/NAME\n"
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_run_that_is_not_finished_is_told_once_and_one_that_is_missing_leaves_nothing(trained, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(trained, path)
    (path / "summary.json").unlink()
    place = Storage.at(path / "checkpoints" / "step-00000009")
    Manifest.read(place).marked(place, final=False)
    (tmp_path / "export.py").write_text(
        "import sys\nfrom girih import cli\n\nsys.exit(cli.run(sys.argv[1:]))\n"
    )
    words = ["export", str(path), "--out", str(tmp_path / "model")]
    done = ran(tmp_path / "export.py", *words, cwd=tmp_path, hidden=("onnxscript",))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not finished; using step-00000009") == 1
    assert run("export", tmp_path / "none", "--out", tmp_path / "other") == 2
    assert not (tmp_path / "other").exists()


LIMITED = """
import resource, sys
from girih import cli
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(cli.run(sys.argv[2:]))
"""
"""As if the disk were full from so many bytes of a file on."""


@pytest.mark.slow
def test_a_full_disk_is_one_line_whichever_file_it_cuts_short(log_directory, tmp_path, no_onnx):
    wide = ["train.max_steps=2", "model.hidden=[512, 256]"]
    assert run("train", log_directory / "config.toml", "--run", tmp_path / "run", "--set", *wide) == 0
    assert run("export", tmp_path / "run", "--out", tmp_path / "whole") == 0
    sizes = {name: (tmp_path / "whole" / name).stat().st_size for name in os.listdir(tmp_path / "whole")}
    assert sizes["rows-0.safetensors"] < sizes["dense.safetensors"]
    (tmp_path / "limited.py").write_text(LIMITED)
    for name in ("rows-0.safetensors", "dense.safetensors"):
        words = [str(sizes[name] - 1), "export", str(tmp_path / "run"), "--out", str(tmp_path / name)]
        done = ran(tmp_path / "limited.py", *words, cwd=tmp_path)
        assert (
            done.stderr
            == f"girih: {tmp_path / name / name}: no space left on the disk; free some and try again\n"
        )
        assert done.returncode == 2
        assert NAME not in os.listdir(tmp_path / name)


def export_until_killed(pipe, run_path, out):
    def kill(*arguments, **options):
        os.kill(os.getpid(), 9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("girih.serving.exporting._write_dense", kill)
        run("export", run_path, "--out", out)


def test_an_export_that_was_killed_is_none_and_is_made_again(trained, tmp_path, no_onnx):
    out = tmp_path / "model"
    assert killed(export_until_killed, trained, out)
    assert "rows-0.safetensors" in os.listdir(out)
    with pytest.raises(MissingFileError, match="not a whole exported model"):
        open_served(out)
    assert run("export", trained, "--out", out) == 0
    open_served(out)


def test_damage_is_told_by_the_name_of_the_file(made, tmp_path):
    for name in sorted(os.listdir(made)):
        copy = tmp_path / name
        shutil.copytree(made, copy)
        damaged = copy / name
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            open_served(copy)
        damaged.unlink()
        with pytest.raises(MissingFileError):
            open_served(copy)
    copy = tmp_path / "other"
    shutil.copytree(made, copy)
    content = json.loads((copy / NAME).read_text())
    for number in (2, 99):  # an older girih's, and a newer one's
        (copy / NAME).write_text(json.dumps(content | {"format": number}))
        expected = rf"format {number}, .* this girih reads format 3; use that one, or export the model again$"
        with pytest.raises(CheckpointError, match=expected):
            open_served(copy)


def resealed(directory, change):
    """Changes the tree of a signature, and seals it."""
    text = sealed_text((directory / NAME).read_bytes())
    tree = json.loads(text)
    change(tree)
    (directory / NAME).write_bytes(seal_text(json.dumps(tree)))


def reshaped(directory, shape):
    """Declares another shape of rows, and seals what says so."""
    path = directory / "rows-0.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["rows"] |= {"shape": shape, "data_offsets": [header["index"]["data_offsets"][1]] * 2}
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(
        content[:8] + text + content[8 + length : 8 + length + header["index"]["data_offsets"][1]]
    )
    seal(directory)


def spoiled(name, make):
    def spoil(directory):
        (directory / name).unlink()
        make(directory / name)

    return spoil


def moved_out(directory):
    shutil.move(directory / "rows-0.safetensors", directory.parent / "rows-0.safetensors")

    def change(tree):
        tree["rows"][0][0]["name"] = "../rows-0.safetensors"

    resealed(directory, change)


def linked_out(directory):
    shutil.move(directory / "rows-0.safetensors", directory.parent / "rows-0.safetensors")
    (directory / "rows-0.safetensors").symlink_to(directory.parent / "rows-0.safetensors")


def with_row(change):
    def spoil(directory):
        path = directory / "rows-0.safetensors"
        rows, content = load_file(path)["rows"], bytearray(path.read_bytes())
        change(content, len(content) - rows.numel() * 4)
        path.write_bytes(content)
        seal(directory)

    return spoil


def twice(content, rows_at):
    """The second key of the index is the first one."""
    start = 8 + int.from_bytes(content[:8], "little")
    slots = np.frombuffer(content, np.int64, (rows_at - start) // 8, start).reshape(-1, 2).copy()
    one, other = np.flatnonzero(slots[:, 1])[:2]
    slots[other, 0], row = slots[one, 0], slots[other, 1] & ((1 << 40) - 1)
    slots[other, 1] = slots[one, 1] >> 40 << 40 | row
    content[start:rows_at] = slots.tobytes()


def not_a_number(content, rows_at):
    content[rows_at : rows_at + 4] = np.float32("nan").tobytes()


DEFECTS = {
    "a shape beyond 64 bits": lambda d: reshaped(d, [2**62, 4]),
    "a shape that wraps to nothing": lambda d: reshaped(d, [0, 2**63 - 1]),
    "a dim beyond floats": lambda d: reshaped(d, [10**400, 0]),
    "100,000 brackets": lambda d: (d / NAME).write_text("[" * 100_000 + "]" * 100_000),
    "no rows": lambda d: resealed(d, lambda tree: tree["rows"].clear()),
    "a file of rows without a checksum": lambda d: resealed(d, lambda tree: tree["rows"][0][0].pop("crc32")),
    "a dense file without one": lambda d: resealed(d, lambda tree: tree["dense"]["parameters"].pop("crc32")),
    "a file of another kind": lambda d: resealed(
        d, lambda tree: tree["dense"].update(more={"name": "x", "bytes": 1, "crc32": 1})
    ),
    "inputs of another schema": lambda d: resealed(
        d, lambda tree: tree["inputs"][0].update(datatype="BYTES")
    ),
    "needs of another model": lambda d: resealed(d, lambda tree: tree["needs"].pop("item")),
    "a directory for rows": spoiled("rows-0.safetensors", os.mkdir),
    "a directory for parameters": spoiled("dense.safetensors", os.mkdir),
    "a directory for the signature": spoiled(NAME, os.mkdir),
    "a pipe for rows": spoiled("rows-0.safetensors", os.mkfifo),
    "a pipe for the signature": spoiled(NAME, os.mkfifo),
    "rows elsewhere": moved_out,
    "rows by a link": linked_out,
    "the last byte of the signature": lambda d: (d / NAME).write_bytes((d / NAME).read_bytes()[:-1]),
    "a key twice": with_row(twice),
    "a row that is NaN": with_row(not_a_number),
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_is_one_line_though_checksums_are_right(made, tmp_path, defect):
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    defect(copy)
    with pytest.raises(CheckpointError) as told:
        open_served(copy)
    assert str(told.value).startswith(str(copy))
    assert len(str(told.value).splitlines()) == 1
    assert len(str(told.value)) < 1000


def test_parameters_that_are_nan_or_of_another_kind_are_refused(made, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    parameters = load_file(made / "dense.safetensors")
    name = next(iter(parameters))
    for change, told in (
        (torch.full_like(parameters[name], torch.nan), "holds NaN"),
        (parameters[name].int(), "int32, expected torch.float32"),
    ):
        save_file(parameters | {name: change}, copy / "dense.safetensors")
        seal(copy)
        with pytest.raises(CheckpointError, match=told):
            open_served(copy)


def test_a_run_is_exported_once_until_it_has_other_weights(trained, tmp_path):
    path, told = tmp_path / "run", []
    shutil.copytree(trained, path)
    with exported(str(path), "run", told.append) as first:
        assert first == path / EXPORTED
        kept = Signature.read(first)
    with exported(str(path), "run", told.append) as again:
        assert again == first
    assert told == [f"{path}: exporting step-00000009 to {path / EXPORTED}"]
    assert kept.dense.program is None
    assert [name for name in os.listdir(path) if name.startswith(".making")] == []
    manifest = Manifest.read(Storage.at(path / "checkpoints" / "step-00000009"))
    signature = kept
    assert signature.source["checkpoint"] == "step-00000009"
    content = json.loads((first / NAME).read_text())
    assert content["fingerprint"] == manifest.fingerprint
    (first / NAME).unlink()  # of another run, or damaged
    with exported(str(path), "run", told.append) as third:
        open_served(third)
    assert len(told) == 2
    with exported(str(path / "checkpoints" / "step-00000009"), "run", told.append) as temporary:
        assert path not in temporary.parents
        open_served(temporary)
    assert not temporary.exists()
    with exported(str(first), "run", told.append) as itself:
        assert itself == first
