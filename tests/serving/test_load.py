"""``girih.load``: the final model of a run, and that it predicts as ``girih predict`` does."""

import json
import logging
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import girih
from girih import cli
from girih.app.run_config import RunConfig
from girih.checkpoint import Manifest, Storage, final_of
from girih.config import plain, write_toml
from girih.errors import CheckpointError, ConfigError, DataError, MissingFileError
from girih.schema import Categorical, Numeric, Schema, Sequence
from girih.serving.dense_graph import described, net_of
from girih.serving.model_directory import open_served
from girih.serving.program import export_program
from girih.serving.reading import RequestReader
from girih.serving.served import Served
from girih.sparse.groups.leaves import example_for
from models.zoo_cases import OPTIONS, features_for, required
from serving.serving_site import tensors_of
from support.store_verbs import read_snapshot

UNFOLLOWED = ("dien", "dsin", "atbrg", "can", "star")
"""Models that torch.export cannot follow: they look into sequences, or at domains."""
USUAL = ("deepfm", "din", "mmoe")
"""The rest of the zoo is for `make test-all`."""


def run(*words):
    return cli.run([str(word) for word in words])


def examples(schema, rows, seed, labels):
    rng = np.random.default_rng(seed)
    columns, seen = {}, rng.integers(0, 5, rows)
    lengths = {"seen": seen, "near": np.full(rows, 2), "kinds": 2 * seen, "far": np.full(rows, 4)}
    for feature in schema.features:
        if isinstance(feature, Numeric):
            columns[feature.name] = rng.integers(0, 3, rows) if feature.name == "scene" else rng.random(rows)
        elif isinstance(feature, Sequence):
            columns[feature.name] = [rng.integers(0, 9, n).tolist() for n in lengths[feature.name]]
        else:
            columns[feature.name] = rng.integers(-9, 9, rows)
    return pa.table(columns | {label: rng.integers(0, 2, rows).astype(np.float32) for label in labels})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n == USUAL[0] else pytest.mark.slow if n in USUAL else pytest.mark.heavy)
        for n in OPTIONS
    ],
)
def test_the_zoo_predicts_as_the_command_line_does(tmp_path, name):
    labels = ["click", "like"] if name in ("mmoe", "esmm") else ["click"]
    features = features_for(name)
    schema = Schema(features, labels)
    new = examples(schema, 100, 8, ())
    pq.write_table(examples(schema, 300, 7, labels), tmp_path / "train.parquet")
    pq.write_table(new, tmp_path / "new.parquet", row_group_size=30)
    write_toml(
        tmp_path / "config.toml",
        {
            "data": {"train": "train.parquet", "batch_size": 64},
            **{key: plain(value) for key, value in schema.to_dict().items() if key != "tables"},
            "model": {"name": name, **OPTIONS[name], **required(name, schema)},
            "sparse_optimizer": {"name": "adagrad", "lr": 0.5},
            "train": {"seed": 5},
        },
    )
    path, out = tmp_path / "run", tmp_path / "out.parquet"
    assert run("train", tmp_path / "config.toml", "--run", path) == 0
    assert run("predict", path, "--data", tmp_path / "new.parquet", "--out", out) == 0
    expected = pq.read_table(out)
    expected = np.stack([expected[column].to_numpy() for column in expected.column_names], axis=1)

    with RunConfig.load(path / "config.toml").trainer() as trainer:  # as training computes it
        trainer.load(path, resume=False)
        of_trainer = trainer.predict(
            girih.read_parquet(tmp_path / "new.parquet", schema, batch_size=64, with_labels=False)
        )
    np.testing.assert_array_equal(of_trainer, expected)

    columns = {column: new[column].to_pylist() for column in new.column_names}
    for place in (path, path / "checkpoints"):  # by its configuration, and by the recipe in the checkpoint
        with girih.load(place) as model:
            assert model.final
            model._opened = replace(model._opened, batch_size=64)
            found = model.predict(columns)
            assert found.dtype == np.float32
            assert found.shape == ((100, 2) if len(labels) == 2 else (100,))
            np.testing.assert_array_equal(found.reshape(100, -1), expected)

    assert run("export", path, "--out", tmp_path / "model") == 0
    signature, served = open_served(tmp_path / "model")
    assert signature.dense.program is None  # the recipe makes it
    reader = RequestReader(served.schema, 64)
    parts = [served.predict(reader.read(tensors_of(new.slice(start, 64)))) for start in (0, 64)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    if name not in UNFOLLOWED:  # its operators stand in for the module
        example = example_for(schema, served.groups, train=False)
        content, tensors = described(export_program(served.spec.module, *example))
        module = net_of(json.dumps(content), tensors, example, len(labels), "here")
        other = Served(
            served.groups,
            served.stacks,
            replace(served.spec, module=module),
            served.normalization,
            schema,
            served.version,
        )
        found = other.predict(reader.read(tensors_of(new.slice(0, 64))))
        np.testing.assert_allclose(found, expected[:64], rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def trained(log_source, tmp_path_factory):
    """A finished run, and its directory of data; only read."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = ("store.shards=2", "train.max_steps=9")
    assert run("train", log_source / "config.toml", "--run", path, "--set", *words) == 0
    return path


def test_all_ways_to_give_examples_agree(trained, log_source):
    import pandas as pd

    table = pq.read_table(log_source / "test.parquet").slice(0, 128)
    rows = table.to_pylist()
    with girih.load(trained) as model:
        expected = model.predict(table)
        assert expected.shape == (128,)
        for given in (
            {name: table[name].to_pylist() for name in table.column_names},
            {name: table[name].combine_chunks() for name in table.column_names},
            rows,
            pd.DataFrame(rows),
            table.to_reader(),
            girih.read_parquet(log_source / "test.parquet", model.schema, batch_size=128),
        ):
            np.testing.assert_array_equal(model.predict(given)[:128], expected)
        one = model.predict({name: value for name, value in rows[3].items() if name != "click"})
        assert one.shape == (1,)
        np.testing.assert_allclose(one[0], expected[3], rtol=1e-5)
        np.testing.assert_array_equal(model.predict(pd.DataFrame(rows).iloc[3]), one)
        numbers = pd.DataFrame(rows)[["user", "x0"]]
        with pytest.raises(DataError, match=r"a Series of floats, .*; take a row by df.iloc\[\[i\]\]"):
            model.predict(numbers.iloc[3])
        with pytest.raises(
            DataError, match=r"a Series whose index names no feature, as \[0, 1, 2\]; expected a dict"
        ):
            model.predict(numbers["user"])
        assert model.predict([]).shape == (0,)
        no_rows = {name: [] for name in ("user", "item", "tags", "x0")}
        assert model.predict(no_rows).shape == (0,)
        for given in ({}, pa.table({})):
            with pytest.raises(
                DataError, match=r"^data: no columns; expected \['user', 'item', 'tags', 'x0'\]$"
            ):
                model.predict(given)
        with pytest.raises(DataError, match=r"^data: no column 'item' \(feature 'item'\); valid: user$"):
            model.predict({"user": []})
        assert model.predict(table.slice(0, 0)).shape == (0,)
        np.testing.assert_array_equal(girih.load(trained).predict(rows), expected)


def test_missing_values_read_as_nulls_of_files_do(trained, tmp_path):
    rows = [{"user": 3, "item": None, "tags": None, "x0": None}, {"user": 3, "tags": [1, 2]}]
    table = pa.table(
        {name: [row.get(name) for row in rows] for name in ("user", "tags")}
        | {"item": pa.nulls(2, pa.int64()), "x0": pa.nulls(2, pa.float32())}
    )
    pq.write_table(table, tmp_path / "nulls.parquet")
    with girih.load(trained) as model:
        of_file = model.predict(
            girih.read_parquet(tmp_path / "nulls.parquet", model.schema, with_labels=False)
        )
        np.testing.assert_array_equal(model.predict(rows), of_file)


def test_embeddings_and_tables_are_the_rows_of_the_checkpoint(trained):
    import pandas as pd

    kept = {}
    for file in sorted((trained / "checkpoints").glob("*/tables/*/*.safetensors")):
        snapshot = read_snapshot(file)
        names = [table["name"] for table in snapshot.description["tables"]]
        columns = (snapshot.column(name) for name in ("ids", "tables", "counts", "embedding"))
        for key, number, count, values in zip(*columns, strict=True):
            kept[names[number], int(key)] = int(count), values
    with girih.load(trained) as model:
        users = model.table("user")
        assert users.ids.tolist() == sorted(key for name, key in kept if name == "user")
        assert users.rows.shape == (len(users.ids), 4)
        for key, row, count in zip(users.ids.tolist(), users.rows, users.counts.tolist(), strict=True):
            assert count == kept["user", key][0]
            np.testing.assert_array_equal(row, kept["user", key][1])
        ids = [*users.ids[:5].tolist(), int(users.ids[0])]
        np.testing.assert_array_equal(model.embedding("user", ids), users.rows[[0, 1, 2, 3, 4, 0]])
        np.testing.assert_array_equal(
            model.embedding("user", torch.tensor(users.ids[:2])), model.embedding("user", users.ids[:2])
        )
        np.testing.assert_array_equal(
            model.embedding("user", pd.Series(ids)), model.embedding("user", [str(i) for i in ids])
        )
        unknown = model.embedding("user", np.array([1 << 60, 1 << 60, -5]))
        np.testing.assert_array_equal(unknown[0], unknown[1])
        assert 0 < np.abs(unknown).max() < 0.1  # initial values, normal(0, 0.01)
        assert model.embedding("user", []).shape == (0, 4)


def test_a_script_s_run_loads_without_its_program(log_source, tmp_path):
    schema = girih.Schema.load(log_source / "config.toml")
    table = pq.read_table(log_source / "test.parquet").slice(0, 200)
    options = girih.TrainOptions(
        seed=9, early_stopping=girih.EarlyStopping(patience=0), evaluate_every_steps=4, max_steps=20
    )
    made = girih.models.DeepFM(schema, hidden=(7, 3), dropout=0.2)
    with girih.Trainer(
        made, options=options, run=tmp_path / "run", sparse_optimizer=girih.optim.Adam(lr=0.5)
    ) as trainer:
        trainer.fit(
            girih.read_parquet(log_source / "train.parquet", schema, batch_size=100),
            girih.read_parquet(log_source / "valid.parquet", schema),
            epochs=2,
        )
        pq.write_table(table, tmp_path / "new.parquet")
        expected = trainer.predict(girih.read_parquet(tmp_path / "new.parquet", schema))[:, 0]
        assert trainer.state.best_step < trainer.state.step
    before = torch.random.get_rng_state()
    with girih.load(tmp_path / "run") as model:
        assert (model.final, model.step) == (True, trainer.state.best_step)
        assert type(model.model) is girih.models.DeepFM
        np.testing.assert_array_equal(model.predict(table), expected)
    assert torch.equal(before, torch.random.get_rng_state())


class Own(girih.models.DNN):
    pass


def test_a_model_of_the_user_s_own_is_given(log_source, tmp_path, caplog):
    schema = girih.Schema.load(log_source / "config.toml")
    with girih.Trainer(Own(schema, hidden=(4,))) as trainer:
        trainer.fit(girih.read_parquet(log_source / "valid.parquet", schema, batch_size=500))
        saved = trainer.save(tmp_path / "models")
        expected = trainer.predict(girih.read_parquet(log_source / "test.parquet", schema))[:, 0]
    with pytest.raises(ConfigError, match=r"class is your own.*give load\(\.\.\., model="):
        girih.load(saved)
    data = pq.read_table(log_source / "test.parquet")
    with (
        caplog.at_level(logging.WARNING),
        girih.load(tmp_path / "models", model=Own(schema, hidden=(4,))) as model,
    ):
        np.testing.assert_array_equal(model.predict(data), expected)
        assert model.final
    assert caplog.text == ""
    with pytest.raises(CheckpointError, match="does not fit this model"):
        girih.load(saved, model=Own(schema, hidden=(5,))).predict(data)
    with pytest.raises(ConfigError, match=r"model = 'mine': expected a torch\.nn\.Module"):
        girih.load(saved, model="mine")
    other = Schema([Categorical(name="user", dim=4)], "click")
    with pytest.raises(ConfigError, match="model: its schema differs"):
        girih.load(saved, model=Own(other))


def test_what_a_script_saved_is_no_run_that_could_be_unfinished(log_source, tmp_path, caplog):
    """Under early stopping too, where the last step is not that of the weights; a run that is still on is told."""
    schema = girih.Schema.load(log_source / "config.toml")
    train = girih.read_parquet(log_source / "valid.parquet", schema, batch_size=100)
    stopping = girih.TrainOptions(early_stopping=girih.EarlyStopping(patience=0), evaluate_every_steps=1)
    table = pq.read_table(log_source / "test.parquet").slice(0, 200)
    made = girih.models.DNN(schema, hidden=(4,))
    options = {"options": stopping, "sparse_optimizer": girih.optim.Adagrad(lr=2.0)}
    with girih.Trainer(made, run=tmp_path / "run", **options) as trainer:
        trainer.fit(train, girih.read_parquet(log_source / "test.parquet", schema), epochs=9)
        assert trainer.state.best_step < trainer.state.step
        expected = trainer.predict(girih.read_arrow(table, schema))[:, 0]
        saved = trainer.save(tmp_path / "models")
    with girih.Trainer(girih.models.DNN(schema, hidden=(4,)), **options) as trainer:
        trainer.load(tmp_path / "models", resume=False)
        np.testing.assert_array_equal(trainer.predict(girih.read_arrow(table, schema))[:, 0], expected)
    best, _ = final_of(tmp_path / "run")
    caplog.clear()  # of what evaluating told
    with caplog.at_level(logging.WARNING):
        for address in (tmp_path / "models", saved, tmp_path / "run"):
            with girih.load(address) as model:
                assert model.final
                np.testing.assert_array_equal(model.predict(table), expected)
        assert caplog.text == ""
        Manifest.read(best).marked(best, final=False)  # as while the run is on
        (tmp_path / "run" / "summary.json").unlink()
        for address in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
            caplog.clear()
            with girih.load(address) as model:
                assert not model.final
            assert f"{address.name}: not finished; using {best.name}" in caplog.text


def test_the_mark_of_the_final_checkpoint_goes_when_the_run_goes_on(log_directory, capsys):
    path = log_directory / "run"
    words = ("train", log_directory / "config.toml", "--run", path, "--set")
    assert run(*words, "train.max_steps=4") == 0
    capsys.readouterr()
    assert run("inspect", path) == 0
    assert "complete, the final weights of its run" in capsys.readouterr().out
    assert (
        run("train", log_directory / "config.toml", "--run", path, "--resume", "--set", "train.max_steps=7")
        == 0
    )
    marks = {place.name: Manifest.read(Storage.at(place)).final for place in (path / "checkpoints").iterdir()}
    assert marks == {"step-00000004": False, "step-00000007": True}
    assert final_of(path / "checkpoints" / "step-00000004")[1] is False
    manifest = path / "checkpoints" / "step-00000007" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["final"] is True


def test_what_cannot_be_loaded_is_one_sentence(trained, tmp_path):
    with pytest.raises(MissingFileError, match="no such run"):
        girih.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        girih.load(tmp_path / "empty")
    with girih.load(trained) as model:
        for given, told in (
            (
                {"user": [1, 2], "item": [1], "tags": [[1], [2]], "x0": [0.0, 1.0]},
                "column 'item' has 1 values, 'user' has 2",
            ),
            ({"user": [1]}, "data: no column 'item' \\(feature 'item'\\)"),
            (
                {"User": [1, 2]},
                "data: no feature reads the columns \\['User'\\]; expected \\['user'",
            ),
            ([{"usr": 1}], "data: no feature reads the columns \\['usr'\\]"),
            ([{"user": 1}, 7], "data: item 1 is an int; expected a dict of columns"),
            ({"user": 1.5, "item": 2, "tags": [], "x0": 0.0}, "column 'user' .* ids are integers or strings"),
            (
                {"user": [object()], "item": [1], "tags": [[1]], "x0": [1.0]},
                "column 'user' cannot be an Arrow column",
            ),
            (7, "data: received an object of type int; expected a dict"),
        ):
            with pytest.raises(DataError, match=told):
                model.predict(given)
        with pytest.raises(
            ConfigError, match="table 'usr': the run has none of that name; did you mean 'user'"
        ):
            model.table("usr")
        with pytest.raises(ConfigError, match="table 'x0'"):
            model.embedding("x0", [1])
        with pytest.raises(DataError, match="ids of 'user': received double; expected integers or strings"):
            model.embedding("user", [1.5])
        for one in (196, "lena"):
            told = (
                f"ids of 'user' = {one!r}: expected integers or strings in a list or an array, as [{one!r}]"
            )
            with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
                model.embedding("user", one)


def test_a_model_prints_as_one_line_for_which_no_row_is_read(trained):
    rows = Manifest.read(final_of(trained)[0]).rows
    with girih.load(trained) as model:
        tables = ", ".join(f"{table.name} {rows[table.name]:,} rows" for table in model.schema.tables)
        assert repr(model) == f"LoadedModel({type(model.model).__name__}, step {model.step}, {tables})"
        assert model._sparse is None


def test_linear_models_have_no_embeddings(log_directory, capsys):
    path = log_directory / "run"
    assert (
        run(
            "train",
            log_directory / "config.toml",
            "--run",
            path,
            "--set",
            "model={name='lr'}",
            "train.max_steps=2",
        )
        == 0
    )
    with girih.load(path) as model:
        assert model.predict([{"user": 1, "item": 2, "tags": [3], "x0": 0.5}]).shape == (1,)
        with pytest.raises(ConfigError, match="table 'user': LR reads only its first-order weights"):
            model.embedding("user", [1])
    capsys.readouterr()
    assert run("export-embeddings", path, "--table", "user", "--out", log_directory / "x.parquet") == 2
    assert "--table user: the run's model reads no embedding of it" in capsys.readouterr().err


def test_exported_embeddings_are_the_table(trained, tmp_path, capsys):
    out = tmp_path / "x.parquet"
    assert run("export-embeddings", trained, "--table", "item", "--out", out) == 0
    table = pq.read_table(out)
    assert f"{table.num_rows:,} embeddings of item in {out}" in capsys.readouterr().out
    assert table.schema.types == [pa.int64(), pa.list_(pa.float32(), 4), pa.int64()]
    expected = girih.load(trained).table("item")
    order = np.argsort(table["id"].to_numpy())
    np.testing.assert_array_equal(table["id"].to_numpy()[order], expected.ids)
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
    np.testing.assert_array_equal(vectors[order], expected.rows)
    np.testing.assert_array_equal(table["count"].to_numpy()[order], expected.counts)
    for words, told in (
        (("--table", "itm"), "--table itm: the run has none of that name; did you mean 'item'?"),
        (
            ("--table", "item", "--out", tmp_path),
            f"is a directory; name a file, as {tmp_path / 'embeddings.parquet'}",
        ),
        (
            ("--table", "item", "--out", tmp_path / "a.csv"),
            "embeddings are written as Parquet; name it a.parquet",
        ),
        (("--table", "item", "--out", tmp_path / "a"), "are written as Parquet; name it a.parquet"),
    ):
        assert run("export-embeddings", trained, "--out", out, *words) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_tables(log_directory, dtype):
    text = (log_directory / "config.toml").read_text() + f'\n[[tables]]\nname = "user"\ndtype = "{dtype}"\n'
    (log_directory / "config.toml").write_text(text)
    path, out = log_directory / "run", log_directory / "out.parquet"
    assert run("train", log_directory / "config.toml", "--run", path, "--set", "train.max_steps=5") == 0
    assert run("predict", path, "--data", log_directory / "test.parquet", "--out", out) == 0
    with girih.load(path) as model:
        found = model.predict(pq.read_table(log_directory / "test.parquet"))
        np.testing.assert_array_equal(found, pq.read_table(out)["prediction"].to_numpy())
        users = model.table("user")
        np.testing.assert_array_equal(model.embedding("user", users.ids), users.rows)


def test_from_an_object_store(log_directory, s3_address):
    path = log_directory / "run"
    words = ("train.max_steps=3", f"checkpoint.dir={s3_address}")
    assert run("train", log_directory / "config.toml", "--run", path, "--set", *words) == 0
    data = pq.read_table(log_directory / "test.parquet").slice(0, 128)
    with girih.load(path) as by_run, girih.load(s3_address) as by_address:
        assert by_run.final
        assert by_address.checkpoint.startswith(s3_address)
        np.testing.assert_array_equal(by_run.predict(data), by_address.predict(data))
        assert len(by_address.table("user").ids) > 0


def test_item_vectors_depend_on_nothing_of_the_users_and_are_those_of_the_trainer(tmp_path):
    schema = Schema([Categorical(name="user"), Numeric(name="age"), Categorical(name="item")], ["click"])
    log = examples(schema, 300, 7, ["click"])
    pq.write_table(log, tmp_path / "train.parquet")
    settings = {
        "data": {"train": "train.parquet", "batch_size": 64},
        **{key: plain(value) for key, value in schema.to_dict().items() if key != "tables"},
        "defaults": {"dim": 4},
        "model": {
            "name": "retrieval",
            "user": ["user", "age"],
            "item_id": "item",
            "tower_dim": 4,
            "hidden": [8],
        },
    }
    write_toml(tmp_path / "config.toml", settings)
    with girih.Trainer.from_config(tmp_path / "config.toml", run=tmp_path / "run", progress=False) as trainer:
        trainer.fit()
        whole = trainer.outputs(
            girih.read_parquet(tmp_path / "train.parquet", trainer.schema, batch_size=300)
        )
    with girih.load(tmp_path / "run") as model:
        found = model.outputs(log)
        np.testing.assert_allclose(found, whole, rtol=1e-5)
        nulls = pa.nulls(len(log))
        items = log.select(["item"]).append_column("user", nulls).append_column("age", nulls)
        assert (model.outputs(items)[:, 4:] == found[:, 4:]).all()
        told = (
            f"no column 'user'; .*, null throughout: 'user': \\[None\\] \\* {len(log)}, 'age': \\[None\\] \\*"
        )
        with pytest.raises(DataError, match=told):
            model.outputs(log.select(["item"]))
        with pytest.raises(DataError, match=r"no column 'user' \(feature 'user'\); valid: item"):
            model.predict(log.select(["item"]))
        with pytest.raises(ConfigError, match="outputs: the data have no examples"):
            model.outputs(log.slice(0, 0))
