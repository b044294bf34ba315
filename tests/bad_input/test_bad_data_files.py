"""Data files that are not there, cannot be read, or do not hold what the schema says: told before training."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CSV = """
data.format = "csv"
data.train = "clicks.csv"
data.valid = "GONE"
data.test = "GONE"
features = [{name = "user", kind = "categorical"}, {name = "price", kind = "numeric"}]
"""

PATHS = [
    ("nothing.parquet", "nothing.parquet: no such file"),
    ("nothing/*.parquet", "nothing/*.parquet: no file matches this pattern; relative paths start at "),
    ("*.feather", "*.feather: no file matches this pattern"),
    ("temporary", "temporary: the directory has no .parquet files"),
    ("config.toml", "config.toml: not a readable Parquet file: "),
    ("clicks.csv", "clicks.csv: not a readable Parquet file: "),
    ("nothing://a/b.parquet", "nothing://a/b.parquet: not an address that can be read: "),
    ("clicks.csv/a.parquet", "clicks.csv/a.parquet: "),
]


@pytest.mark.parametrize(("path", "told"), PATHS, ids=[path for path, _ in PATHS])
@pytest.mark.parametrize("split", ["train", "test"])
def test_paths(site, path, told, split):
    site.configure(f'data.{split} = "{path}"')
    line = site.told(*site.train())
    assert told in line
    if "no such file" in told or "matches this" in told:
        assert line.startswith(f'data.{split} = "{path}": {site / path}: no ')
        assert line.endswith(
            f"; relative paths start at {(site / path).parents[path.count('/')]}, where the config file is"
        )


def test_a_catalogue_that_is_not_there_names_its_key(site):
    site.configure('negatives = {items = "gone.parquet", features = ["item"], per_step = 4}')
    start = f"{site / 'gone.parquet'}: no such file; relative paths start at {(site / 'gone.parquet').parent}"
    assert site.told(*site.train()) == (
        f'negatives.items = "gone.parquet": {start}, where the config file is'
    )


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-50])


def without_a_middle(path):
    content = path.read_bytes()
    path.write_bytes(content[:2000] + content[2100:])


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("user,click\n1,0\n")


def magic_only(path):
    path.write_bytes(b"PAR1" * 3)


def no_rows(path):
    pq.write_table(pq.read_table(path).slice(0, 0), path)


def no_columns(path):
    pq.write_table(pa.table({}), path)


PARQUET = [
    (cut_short, "train.parquet: not a readable Parquet file: "),
    (empty, "train.parquet: the file is empty; expected Parquet"),
    (text, "train.parquet: not a readable Parquet file: "),
    (magic_only, "train.parquet: not a readable Parquet file: "),
    (no_rows, "train.parquet: no rows in the file; expected at least one"),
    (no_columns, "train.parquet: no rows in the file; expected at least one"),
]


@pytest.mark.parametrize(("damage", "told"), PARQUET, ids=[damage.__name__ for damage, _ in PARQUET])
def test_damaged_parquet(site, damage, told):
    damage(site / "train.parquet")
    assert told in site.told(*site.train())


def test_parquet_damaged_inside_is_found_while_training(site):
    content = bytearray((site / "train.parquet").read_bytes())
    content[40:400] = bytes(360)
    (site / "train.parquet").write_bytes(content)
    line = site.told(*site.train())
    assert f"{site / 'train.parquet'}: row group 1 cannot be read: " in line


COLUMNS = [
    ("features.0.column = 'usre'", "no column 'usre' (feature 'user'); did you mean 'user'?"),
    ("labels.names = ['clik']", "no column 'clik' (label 'clik'); did you mean 'click'?"),
    ("labels.weight = 'wieght'", "no column 'wieght' (labels: weight); did you mean 'weight'?"),
    ("features.2.weights = 'tag_weights'", "no column 'tag_weights' (weights of feature 'tags')"),
    ("labels.derive.click = 'ratng > 3'", "no column 'ratng' (label 'click'); did you mean 'rating'?"),
    ("features.0.column = 'price'", "column 'price' (double) of feature 'user': ids are integers or strings"),
    (
        "features.3.column = 'price'",
        "column 'price' (double) of feature 'history': ids are integers or strings",
    ),
    (
        "features.0.column = 'when'",
        "column 'when' (timestamp[ms]) of feature 'user': ids are integers or strings, or lists of them; set transform = 'hour' or 'weekday' for a part of these times, or cast the column to integers",
    ),
    ("features.4.column = 'item'", "column 'item' (string) of feature 'price': expected numbers; cast the"),
    (
        "features.4.column = 'tags'",
        "of feature 'price': expected numbers; cast the column, or make the feature",
    ),
    (
        "features.4.column = 'when'",
        "column 'when' (timestamp[ms]) of feature 'price': expected numbers; set transform = 'hour' or",
    ),
    ("features.2.separator = '|'", "of feature 'tags': separator '|' splits strings; drop it"),
    (
        "features.1.bucketize = [1.0]",
        "column 'item' (string) of feature 'item': bucketize expects one number a row",
    ),
    (
        "features.2.weights = 'price'",
        "column 'price' (double), weights of feature 'tags': expected lists where",
    ),
    (
        "features.2.weights = 'item'",
        "column 'item' (string), weights of feature 'tags': expected lists of num",
    ),
    (
        "labels.names = ['item']\nfeatures.1.column = 'user'",
        "column 'item' (string) of label 'item': expected numb",
    ),
    ("labels.derive.click = \"rating == 'five'\"", "compared with text 'five'; drop the inner quotes"),
    (
        "labels.derive.click = 'item > 3'\nfeatures.1.column = 'user'\nfeatures.3.column = 'tags'",
        "column 'item' (string) of label 'click': expected numbers; put the value",
    ),
    ("labels.weight = 'item'", "column 'item' (string): example weights are numbers"),
]


@pytest.mark.parametrize(("change", "told"), COLUMNS, ids=[change for change, _ in COLUMNS])
def test_columns_that_do_not_serve(site, change, told):
    site.configure(change)
    line = site.told(*site.train())
    assert line.startswith(f"{site / 'train.parquet'}: ")
    assert told in line


def test_files_that_disagree_on_a_column(site):
    table = pq.read_table(site / "valid.parquet")
    place = table.column_names.index("user")
    table = table.set_column(place, "user", table["user"].cast(pa.string()))
    pq.write_table(table, site / "other.parquet")
    site.configure("data.train = ['train.parquet', 'other.parquet']")
    told = site.told(*site.train())
    assert f"{site / 'other.parquet'}: column 'user' has strings, but integers in " in told


def test_only_the_test_data_lacks_a_column(site):
    pq.write_table(pq.read_table(site / "test.parquet").drop_columns(["item"]), site / "test.parquet")
    assert f"{site / 'test.parquet'}: no column 'item' (feature 'item')" in site.told(*site.train())


TEXT = {
    "empty": (b"", "clicks.csv: the file is empty; expected lines of text"),
    "blank": (b"\n\n\n", "clicks.csv: the file is empty; expected lines of text"),
    "a header and nothing else": (
        b"user,price,click\n",
        "clicks.csv: no rows; expected at least one below the h",
    ),
    "another separator": (b"user;price;click\n1;2;0\n", "clicks.csv: no column 'user' (feature 'user')"),
    "no header": (b"1,2,0\n3,4,1\n", "clicks.csv: no column 'user' (feature 'user')"),
    "a column misspelt": (
        b"usr,price,click\n1,2,0\n",
        "no column 'user' (feature 'user'); did you mean 'usr'?",
    ),
    "a header of another separator": (
        b"user;price;click\n1;2;0\n",
        "no column 'user' (feature 'user'); the header is one column, 'user;price;click': set separator = ';'",
    ),
    "a column twice": (
        b"user,user,price,click\n1,1,2,0\n",
        "2 columns are named 'user' (feature 'user'); rename",
    ),
    "UTF-16": (
        "user,price,click\n1,2,0\n".encode("utf-16"),
        'looks like UTF-16 text, expected UTF-8 text; set data.encoding = "utf-16"',
    ),
    "zero bytes": (b"user,pri\0ce,click\n1,2,0\n", "holds zero bytes; expected UTF-8 text"),
    "JSON lines": (
        b'{"user": 1, "click": 0}\n',
        'looks like JSON lines, expected a header; set data.format = "jsonl"',
    ),
    "Latin-1 in the header": ("üser,price,click\n1,2,0\n".encode("latin-1"), "the header is not UTF-8 text"),
    "lines that end in carriage returns": (b"user,price,click\r1,2,0\r", "lines end in \\n or \\r\\n"),
}


@pytest.mark.parametrize(("content", "told"), TEXT.values(), ids=TEXT)
def test_text_that_is_not_the_csv_expected(site, content, told):
    site.configure(CSV)
    (site / "clicks.csv").write_bytes(content)
    line = site.told(*site.train())
    assert line.startswith(f"{site / 'clicks.csv'}: ")
    assert told in line


def test_gzip_in_name_only(site):
    site.configure(CSV.replace("clicks.csv", "clicks.csv.gz"))
    (site / "clicks.csv.gz").write_text("user,price,click\n1,2,0\n")
    told = site.told(*site.train())
    assert "clicks.csv.gz: not gzip-compressed in spite of its name; compress it, or rename it" in told


def test_gzip_cut_short(site):
    site.configure(CSV.replace("clicks.csv", "clicks.csv.gz"))
    lines = "user,price,click\n" + "".join(f"{i * 7919},{i * 0.37},{i % 2}\n" for i in range(20000))
    whole = gzip.compress(lines.encode())
    (site / "clicks.csv.gz").write_bytes(whole[: len(whole) // 2])
    assert "clicks.csv.gz: the gzip data is damaged or cut short: " in site.told(*site.train())


def test_a_directory_of_csv(site):
    site.configure(CSV.replace("clicks.csv", "temporary"))
    told = site.told(*site.train())
    assert "temporary: is a directory; name files, or a pattern such as " in told


def test_criteo_of_another_shape(site):
    site.configure('data = {format = "criteo", train = "clicks.csv", valid = "GONE", test = "GONE"}')
    assert "no column 'user' (feature 'user'); " in site.told(*site.train())


LABELS = [
    (
        "labels.mask = {click = 'clicked'}",
        "no column 'clicked' (mask of label 'click'); did you mean 'click'?",
    ),
    ("labels.mask = {click = 'rating'}", "expected 0 or 1, as masks are"),
    (
        "labels.mask = {click = 'rating = 4'}",
        "no column 'rating = 4' (mask of label 'click'); did you mean 'rating'?",
    ),
    (
        "labels.label_weight = {click = 'item'}",
        "'item' (string), label_weight of label 'click': weights are numbers",
    ),
    ("labels.names = ['item']", "column 'item' (string) of label 'item': expected numbers; derive the label"),
]


@pytest.mark.parametrize(("change", "told"), LABELS, ids=[change for change, _ in LABELS])
def test_columns_of_labels(site, change, told):
    site.configure("features = [{name = 'user', kind = 'categorical'}]", change)
    assert told in site.told(*site.train())
