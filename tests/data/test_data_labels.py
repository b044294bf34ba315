"""Labels that count for some examples only: missing, masked out, weighted, numbers of any size."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih.data import read_csv, read_parquet
from girih.data.batch import Share, label_scale, micro_batches, share_of
from girih.data.decode.conditions import Comparison, column_text, parse_condition
from girih.errors import ConfigError, DataError
from girih.schema import Categorical, Labels, Schema

NAN, NULL = float("nan"), None
TABLE = pa.table(
    {
        "user": [1, 2, 3, 4, 5, 6],
        "click": [1, 0, NULL, 1, 0, 1],
        "buy": pa.array([1.0, NAN, NULL, 0.0, 7.0, 1.0]),
        "spent": pa.array([9.5, NULL, NULL, -2.0, NULL, 1e30]),
        "shown": [True, True, True, True, False, True],
        "place": ["top", "end", "top", NULL, "end", "end"],
        "trust": pa.array([1.0, 2.0, 3.0, 0.5, NULL, 0.0]),
    }
)
LABELS = {"names": ("click", "buy", "spent"), "loss": {"spent": "huber"}, "missing": "skip"}


def batch_of(table=TABLE, **options):
    schema = Schema([Categorical(name="user")], Labels(**{**LABELS, **options}))
    with tempfile.TemporaryDirectory() as directory:
        pq.write_table(table, Path(directory, "log.parquet"))
        (batch,) = read_parquet(Path(directory, "log.parquet"), schema, batch_size=10)
    return batch


def refusal(table=TABLE, **options):
    with pytest.raises(DataError) as caught:
        batch_of(table, **options)
    return str(caught.value)


def test_what_is_missing_or_masked_out_weighs_nothing_and_is_not_looked_at():
    batch = batch_of(
        mask={"buy": "shown", "spent": "click"}, label_weight={"buy": "trust"}, names=("buy", "spent")
    )
    # the 7 of a row that is not shown is nobody's business, nor is its weight
    assert batch.labels.tolist() == [[1, 9.5], [0, 0], [0, 0], [0, -2], [0, 0], [1, np.float32(1e30)]]
    assert batch.label_weights.tolist() == [[1, 1], [0, 0], [0, 0], [0.5, 1], [0, 0], [0, 1]]


def test_a_mask_may_be_a_condition_on_words_and_a_derived_label_may_be_missing():
    batch = batch_of(
        TABLE.slice(0, 3),
        names=("top",),
        loss={},
        derive={"top": "place == 'top'"},
        mask={"top": "trust > 1"},
    )
    assert batch.labels.tolist() == [[0], [0], [1]]
    assert batch.label_weights.tolist() == [[0], [1], [1]]
    batch = batch_of(names=("top",), loss={}, derive={"top": "place == 'top'"})
    assert batch.labels.ravel().tolist() == [1, 0, 1, 0, 0, 0]
    assert batch.label_weights.ravel().tolist() == [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("name", ["own score", "score>=3", 'he said "it\'s" in [1]', "back\\slash", "a=b"])
def test_a_condition_reads_a_column_of_any_name(name):
    table = pa.table({"user": [1, 2, 3], name: [1, 4, 5], f"{name}?": [0, 1, 1]})
    batch = batch_of(
        table,
        names=("top",),
        loss={},
        derive={"top": f"column({name!r}) >= 4"},
        mask={"top": f"column({name + '?'!r})"},
    )
    assert batch.labels.ravel().tolist() == [0, 1, 1]
    assert batch.label_weights.ravel().tolist() == [0, 1, 1]
    listed = batch_of(table, names=("top",), loss={}, derive={"top": f"column({name!r})in [1, 5]"})
    assert listed.labels.ravel().tolist() == [1, 0, 1]
    condition = parse_condition("top", f"{column_text(name)} > 2")
    assert condition == Comparison(name, "greater", 2)


@pytest.mark.parametrize("name", ["clicks#7d", "(x)", "µ_ok", "a-b"])
def test_the_name_of_a_mask_is_taken_as_it_is(name):
    table = pa.table({"user": [1, 2], "click": [1, 1], name: [0, 1]})
    batch = batch_of(table, names=("click",), loss={}, mask={"click": name})
    assert batch.label_weights.ravel().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("hash > 0", [1, 0, 1]),
        ("hash > -1", [1, 1, 1]),
        (f"hash == {2**63 + 5}", [1, 0, 0]),
        (f"hash in [3, {2**63 + 5}]", [1, 0, 1]),
        ("hash >= 3.5", [1, 0, 0]),
        ("hash >= +3", [1, 0, 1]),
        ("hash\n>= 3", [1, 0, 1]),
        (f"small < {2**63}", [1, 1, 1]),
        (f"small > {2**63}", [0, 0, 0]),
    ],
)
def test_large_integers_are_compared_as_they_are(condition, expected):
    table = pa.table(
        {
            "user": [1, 2, 3],
            "hash": pa.array([2**63 + 5, 0, 3], pa.uint64()),
            "small": pa.array([1, -2, 3], pa.int64()),
        }
    )
    batch = batch_of(table, names=("top",), loss={}, derive={"top": condition})
    assert batch.labels.ravel().tolist() == expected


def test_text_may_leave_a_label_out_or_spell_nan(tmp_path):
    (tmp_path / "a.csv").write_text("user,click\n1,1\n2,\n3,nan\n4, 0\n")
    schema = Schema([Categorical(name="user")], Labels(names=("click",), missing="skip"))
    (batch,) = read_csv(tmp_path / "a.csv", schema)
    assert batch.label_weights.ravel().tolist() == [1, 0, 0, 1]
    (tmp_path / "a.csv").write_text("user,click\n1,1\n2,yes\n")
    with pytest.raises(DataError, match="line 3: column 'click' = 'yes': expected a label in"):
        list(read_csv(tmp_path / "a.csv", schema))


def test_without_leave_a_missing_label_is_a_bad_row_that_says_how_to_mend_it():
    mend = "; if labels may be missing, set labels.missing = 'skip'"
    for column, of, expected in (
        ("click", "bce", "a label in [0, 1]"),
        ("spent", "mse", "a label that is a finite number"),
    ):
        told = refusal(names=(column,), loss={column: of}, missing="error")
        assert told.endswith(f"column {column!r} is missing: expected {expected}{mend}")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"names": ("buy",), "loss": {}}, "column 'buy' = 7.0: expected a label in [0, 1]"),
        ({"mask": {"buy": "trust"}}, "column 'trust' = 2.0: expected 0 or 1 in a mask"),
        ({"mask": {"buy": "place"}}, "column 'place' (string), mask of label 'buy': expected 0 and 1"),
        ({"mask": {"buy": "clicked"}}, "no column 'clicked' (mask of label 'buy')"),
        ({"label_weight": {"click": "weigth"}}, "no column 'weigth' (label_weight of label 'click')"),
        ({"label_weight": {"click": "place"}}, "'place' (string), label_weight of label 'click': weights are numbers"),
        ({"names": ("spent",), "label_weight": {"spent": "spent"}}, "column 'spent' = -2.0: expected a finite weight ≥ 0"),
        ({"names": ("click",), "loss": {}, "label_weight": {"click": "trust"}}, "column 'trust' is missing: expected a finite"),
        ({"names": ("place",), "loss": {}}, "'place' (string) of label 'place': expected numbers; derive the label"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(options, told):
    assert told in refusal(**options)


def test_options_of_a_label_that_is_not_there_are_refused():
    for option in ("mask", "label_weight", "loss"):
        with pytest.raises(ConfigError, match=f"labels: {option} has 'x', which is not among names"):
            Labels(names=("click",), **{option: {"x": "mse"}})
    with pytest.raises(ConfigError, match="expected one of 'bce', 'mse', 'huber'"):
        Labels(names=("click",), loss={"click": "rmse"})


def test_shares_and_micro_batches_keep_the_scale_of_the_whole_step():
    batch = batch_of(names=("click", "buy"), loss={}, mask={"buy": "shown"})
    scale = label_scale(batch)
    assert scale.tolist() == [6 / 5, 6 / 3]
    for rank in range(4):  # some have no label of either kind
        share = share_of(batch, rank, 4)
        assert label_scale(share).tolist() == scale.tolist()
        for _, part in micro_batches(share, 2):
            assert label_scale(part).tolist() == scale.tolist()
    nothing = batch_of(TABLE.slice(2, 1), names=("click", "buy"), loss={})
    assert label_scale(nothing).tolist() == [0, 0]
    assert isinstance(share_of(nothing, 0, 1).share, Share)


def test_fingerprints_of_schemas_without_such_labels_are_what_they_were(tmp_path):
    features = [Categorical(name="user", dim=4)]
    assert Schema(features, "click").fingerprint() == "5efd83f5683b5688"
    of = {loss: Schema(features, Labels(names=("click",), loss={"click": loss})) for loss in ("bce", "mse")}
    assert of["mse"].fingerprint() != of["bce"].fingerprint()
    masked = Labels(names=("click",), mask={"click": "shown"}, missing="skip")
    assert Schema(features, masked).fingerprint() == "5efd83f5683b5688"


@pytest.mark.usefixtures("torch")
def test_all_labels_missing_in_a_batch_train_nothing_and_give_no_nan(tmp_path):
    import torch

    import girih

    table = pa.table({"user": np.arange(64) % 7, "click": pa.array([None] * 32 + [0, 1] * 16, pa.int8())})
    pq.write_table(table, tmp_path / "a.parquet")
    schema = Schema([Categorical(name="user", dim=4)], Labels(names=("click",), missing="skip"))
    data = girih.read_parquet(tmp_path / "a.parquet", schema, batch_size=32)
    model = girih.models.DNN(schema, hidden=(4,))
    losses = []

    class Heard(girih.Callback):
        def on_metrics(self, record):
            losses.append(record["loss"])

    options = girih.TrainOptions(log_every_steps=1)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    before = [p.detach().clone() for p in model.parameters()]
    with girih.Trainer(
        model, dense_optimizer=sgd, options=girih.TrainOptions(log_every_steps=1, max_steps=1)
    ) as trainer:
        trainer.fit(data)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with girih.Trainer(model, dense_optimizer=sgd, options=options, callbacks=[Heard()]) as trainer:
        trainer.fit(data)
        metrics = trainer.evaluate(data)
    assert losses[0] == 0
    assert 0.5 < losses[1] < 1
    assert metrics.num_examples == 32
