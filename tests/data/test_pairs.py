"""libsvm as one bag, and libffm."""

import numpy as np
import pytest

import girih
from data.test_list_cells import bags, weights
from girih import Categorical, Labels, Numeric, Schema, Sequence
from girih.data import Position
from girih.errors import ConfigError, DataError

BAG = Schema([Categorical(name="pairs")], "y")
FIELDS = [
    Categorical(name="user", column="0"),
    Sequence(name="seen", column="7"),
    Numeric(name="2"),
    Categorical(name="bucket", column="2", bucketize=[0.5]),
]


def write(folder, text, name="x.txt"):
    (folder / name).write_text(text)
    return folder / name


def test_all_pairs_of_a_line_are_one_bag(tmp_path):
    path = write(tmp_path, "1 3:1 17:0.5\n0\n\n 0.5\t4:2   18446744073709551615:1 # a note\r\n1 5:-1e-1")
    (batch,) = girih.read_libsvm(path, BAG)
    assert bags(batch) == [[3, 17], [], [4, -1], [5]]
    assert weights(batch) == [[1.0, 0.5], [], [2.0, 1.0], [np.float32(-0.1)]]
    assert batch.labels[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0]
    (batch,) = girih.read_libsvm(path, Schema([Sequence(name="pairs", max_length=1)], "y"))
    assert bags(batch) == [[17], [], [-1], [5]]


def test_labels_of_minus_one_and_lines_without_labels(tmp_path):
    labels = Labels(names="y", derive={"y": "label > 0"})
    (batch,) = girih.read_libsvm(write(tmp_path, "-1 1:1\n+1 2:1\n"), Schema(BAG.features, labels))
    assert batch.labels[:, 0].tolist() == [0.0, 1.0]
    (batch,) = girih.read_libsvm(write(tmp_path, "1:1 2:1\n3:1\n"), BAG, with_labels=False)
    assert bags(batch) == [[1, 2], [3]]


BAD = {
    "1 1:1 x": "line 2: a word without a colon: expected label index:value",
    "1 1:1:1": "line 2: a word with several colons",
    "1 a:1": "line 2: an index that is not an integer",
    "1 1.5:1": "line 2: an index that is not an integer",
    "1 1:": "line 2: a value that is missing",
    "1 1:x": "line 2: column '1:value' = .*: expected finite numbers as weights",
    "1 1:nan": "line 2: column '1:value'",
    "x 1:1": "line 2: column 'y' = 'x': expected a label",
    "1:1": "line 2: column 'y' is missing",
    "1 2 1:1": "line 2: a word without a colon",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_of_a_bag(tmp_path, line):
    path = write(tmp_path, f"1 3:1\n{line}\n0 4:1\n")
    with pytest.raises(DataError, match=BAD[line]):
        list(girih.read_libsvm(path, BAG))
    data = girih.read_libsvm(path, BAG, on_bad_row="skip")
    assert [bags(batch) for batch in data] == [[[3], [4]]]
    assert data.num_skipped == 1


def test_a_field_is_a_feature(tmp_path):
    path = write(tmp_path, "1 0:5:1 7:1:1 7:2:1 2:9:0.25\n0 2:9:3 0:6:2 0:8:0.5\n1\n")
    (batch,) = girih.read_libffm(path, Schema(FIELDS, "y"))
    assert bags(batch, 0) == [[5], [6, 8], []]
    assert weights(batch, 0) == [[1.0], [2.0, 0.5], []]
    assert bags(batch, 1) == [[1, 2], [], []]
    assert bags(batch, 2) == [[0], [1], [girih.data.NULL_ID]]
    assert batch.numeric[:, 0].tolist() == [0.25, 3.0, 0.0]


def test_bad_lines_of_libffm(tmp_path):
    path = write(tmp_path, "1 0:5:1\n1 5:1\n1 0:a:1\n1 2:1:1 2:1:1\n0 2:9:x\n")
    data = girih.read_libffm(path, Schema(FIELDS, "y"), on_bad_row="skip")
    assert sum(batch.num_examples for batch in data) == 1
    assert data.skipped.by_reason == {
        "not field:index:value": 3,
        "column '4:value': expected a finite number": 1,
    }


@pytest.mark.parametrize("read", [girih.read_libsvm, girih.read_libffm])
def test_blocks_shuffling_and_resuming(tmp_path, read):
    middle = "0:" if read is girih.read_libffm else ""
    lines = [f"{r % 2} " + " ".join(f"{middle}{r + k}:1" for k in range(r % 4)) for r in range(200)]
    path = write(tmp_path, "\n".join(lines) + "\n")
    schema = Schema([Categorical(name="0")], "y")
    whole = [bag for batch in read(path, schema) for bag in bags(batch)]
    assert whole == [[r + k for k in range(r % 4)] for r in range(200)]
    data = read(path, schema, block_bytes=150, batch_size=16, shuffle=True, shuffle_rows=40)
    steps = list(data.batches())
    position = Position.from_dict(steps[4][1].to_dict())
    again = [bags(batch) for batch, _ in data.batches(position=position)]
    assert again == [bags(batch) for batch, _ in steps[5:]]
    assert sorted(bag for batch, _ in steps for bag in bags(batch)) == sorted(whole)


@pytest.mark.parametrize(
    "feature",
    [
        Categorical(name="a", separator="|"),
        Categorical(name="a", weights="b"),
        Categorical(name="a", weight_separator=":"),
        Sequence(name="a", list_format="brackets"),
    ],
)
def test_options_of_cells_do_not_go_with_pairs(tmp_path, feature):
    path = write(tmp_path, "1 0:5:1\n")
    for read in (girih.read_libffm, girih.read_libsvm):
        with pytest.raises(ConfigError, match="does not go with lib"):
            read(path, Schema([feature], "y"))
