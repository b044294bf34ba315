"""Data files that are not there, cannot be read, or do not hold what the schema says: an error before training."""

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
]  # fmt: skip


@pytest.mark.parametrize(("path", "message"), PATHS, ids=[path for path, _ in PATHS])
@pytest.mark.parametrize("split", ["train", "test"])
def test_paths(site, path, message, split):
    site.configure(f'data.{split} = "{path}"')
    line = site.refusal(*site.train())
    assert message in line
    if "no such file" in message or "matches this" in message:
        assert line.startswith(f'data.{split} = "{path}": {site / path}: no ')
        assert line.endswith(
            f"; relative paths start at {(site / path).parents[path.count('/')]}, the directory of the config file"
        )


def test_a_catalogue_that_is_not_there_names_its_key(site):
    site.configure('negatives = {items = "gone.parquet", features = ["item"], per_step = 4}')
    start = f"{site / 'gone.parquet'}: no such file; relative paths start at {(site / 'gone.parquet').parent}"
    assert site.refusal(*site.train()) == (
        f'negatives.items = "gone.parquet": {start}, the directory of the config file'
    )


PARQUET = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-50]), "not a readable Parquet file: "),
    "empty": (lambda path: path.write_bytes(b""), "the file is empty; expected Parquet"),
    "text": (lambda path: path.write_text("user,item\n1,2\n"), "not a readable Parquet file: "),
    "magic only": (lambda path: path.write_bytes(b"PAR1" * 3), "not a readable Parquet file: "),
    "no columns": (lambda path: pq.write_table(pa.table({}), path), "no rows in the file; expected at least one"),
    "no rows": (lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path), "no rows in the file; expected at least one"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), PARQUET.values(), ids=PARQUET)
def test_damaged_parquet(site, damage, message):
    damage(site / "train.parquet")
    assert f"train.parquet: {message}" in site.refusal(*site.train())


def test_parquet_damaged_inside_is_found_while_training(site):
    content = bytearray((site / "train.parquet").read_bytes())
    content[40:400] = bytes(360)
    (site / "train.parquet").write_bytes(content)
    line = site.refusal(*site.train())
    assert f"{site / 'train.parquet'}: row group 1 cannot be read: " in line


COLUMNS = [
    ("features.0.column = 'usre'", "no column 'usre' (feature 'user'); did you mean 'user'?"),
    ("labels.names = ['clik']", "no column 'clik' (label 'clik'); did you mean 'click'?"),
    ("labels.weight = 'wieght'", "no column 'wieght' (labels: weight); did you mean 'weight'?"),
    ("features.2.weights = 'tag_weights'", "no column 'tag_weights' (weights of feature 'tags')"),
    ("labels.derive.click = 'ratng > 3'", "no column 'ratng' (label 'click'); did you mean 'rating'?"),
    ("features.0.column = 'price'", "column 'price' (double) of feature 'user': ids are integers or strings"),
    ("features.0.column = 'when'", "column 'when' (timestamp[ms]) of feature 'user': ids are integers or strings, or lists of them; set transform = 'hour' or 'weekday' for a part of these times, or cast the column to integers"),
    ("features.4.column = 'item'", "column 'item' (string) of feature 'price': expected numbers; cast the"),
    ("features.4.column = 'when'", "column 'when' (timestamp[ms]) of feature 'price': expected numbers; set transform = 'hour' or"),
    ("features.2.weights = 'price'", "column 'price' (double), weights of feature 'tags': expected lists if and only if"),
    ("features.2.weights = 'item'", "column 'item' (string), weights of feature 'tags': expected lists of num"),
    ("labels.names = ['item']\nfeatures.1.column = 'user'", "column 'item' (string) of label 'item': expected numb"),
    ("labels.mask = {click = 'clicked'}", "no column 'clicked' (mask of label 'click'); did you mean 'click'?"),
    ("labels.mask = {click = 'rating = 4'}", "no column 'rating = 4' (mask of label 'click'); did you mean 'rating'?"),
    ("labels.label_weight = {click = 'item'}", "'item' (string), label_weight of label 'click': weights are numbers"),
    ("labels.derive.click = \"rating == 'five'\"", "compared with text 'five'; drop the inner quotes"),
    ("labels.derive.click = 'item > 3'\nfeatures.1.column = 'user'\nfeatures.3.column = 'tags'", "column 'item' (string) of label 'click': expected numbers; put the value"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), COLUMNS, ids=[change for change, _ in COLUMNS])
def test_columns_that_do_not_serve(site, change, message):
    site.configure(change)
    line = site.refusal(*site.train())
    assert line.startswith(f"{site / 'train.parquet'}: ")
    assert message in line


def test_files_that_disagree_on_a_column(site):
    table = pq.read_table(site / "valid.parquet")
    place = table.column_names.index("user")
    table = table.set_column(place, "user", table["user"].cast(pa.string()))
    pq.write_table(table, site / "other.parquet")
    site.configure("data.train = ['train.parquet', 'other.parquet']")
    line = site.refusal(*site.train())
    assert f"{site / 'other.parquet'}: column 'user' has strings, but integers in " in line


def test_only_the_test_data_lacks_a_column(site):
    pq.write_table(pq.read_table(site / "test.parquet").drop_columns(["item"]), site / "test.parquet")
    assert f"{site / 'test.parquet'}: no column 'item' (feature 'item')" in site.refusal(*site.train())


TEXT = {
    "empty": (b"", "clicks.csv: the file is empty; expected lines of text"),
    "a header and nothing else": (b"user,price,click\n", "clicks.csv: no rows; expected at least one below the h"),
    "another separator": (b"user;price;click\n1;2;0\n", "clicks.csv: no column 'user' (feature 'user')"),
    "no header": (b"1,2,0\n3,4,1\n", "clicks.csv: no column 'user' (feature 'user')"),
    "a column misspelt": (b"usr,price,click\n1,2,0\n", "no column 'user' (feature 'user'); did you mean 'usr'?"),
    "a header of another separator": (b"user;price;click\n1;2;0\n", "no column 'user' (feature 'user'); the header is one column, 'user;price;click': set separator = ';'"),
    "zero bytes": (b"user,pri\0ce,click\n1,2,0\n", "holds zero bytes; expected UTF-8 text"),
    "lines that end in carriage returns": (b"user,price,click\r1,2,0\r", "lines end in \\n or \\r\\n"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), TEXT.values(), ids=TEXT)
def test_text_that_is_not_the_csv_expected(site, content, message):
    site.configure(CSV)
    (site / "clicks.csv").write_bytes(content)
    line = site.refusal(*site.train())
    assert line.startswith(f"{site / 'clicks.csv'}: ")
    assert message in line


def test_gzip_in_name_only(site):
    site.configure(CSV.replace("clicks.csv", "clicks.csv.gz"))
    (site / "clicks.csv.gz").write_text("user,price,click\n1,2,0\n")
    line = site.refusal(*site.train())
    assert "clicks.csv.gz: not gzip-compressed, despite its name; compress it, or rename it" in line


def test_gzip_cut_short(site):
    site.configure(CSV.replace("clicks.csv", "clicks.csv.gz"))
    lines = "user,price,click\n" + "".join(f"{i * 7919},{i * 0.37},{i % 2}\n" for i in range(20000))
    whole = gzip.compress(lines.encode())
    (site / "clicks.csv.gz").write_bytes(whole[: len(whole) // 2])
    assert "clicks.csv.gz: the gzip data is damaged or cut short: " in site.refusal(*site.train())


def test_a_directory_of_csv(site):
    site.configure(CSV.replace("clicks.csv", "temporary"))
    line = site.refusal(*site.train())
    assert "temporary: is a directory; name files, or a pattern such as " in line


def test_criteo_of_another_shape(site):
    site.configure('data = {format = "criteo", train = "clicks.csv", valid = "GONE", test = "GONE"}')
    assert "no column 'user' (feature 'user'); " in site.refusal(*site.train())
