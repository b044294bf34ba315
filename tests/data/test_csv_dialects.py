"""CSV with separators of several characters, and with line breaks in cells."""

import csv
import io
import pickle

import numpy as np
import pytest

import girih
from data.test_list_cells import ids_of
from girih import Categorical, Numeric, Schema
from girih.data import Position
from girih.data.formats import text
from girih.errors import DataError

SCHEMA = Schema([Categorical(name="user"), Categorical(name="item"), Numeric(name="price")], "click")
ROWS = [
    ["user", "item", "price", "click"],
    *[[f"u{r % 9}", f"i {r % 7}", str(r / 4), str(r % 2)] for r in range(60)],
]


def contents(steps):
    return [(b.ids.tolist(), b.numeric.tolist(), b.labels.tolist()) for b, _ in steps]


def steps_of(path, **options):
    data = girih.read_csv(path, SCHEMA, batch_size=16, **options)
    return data, list(data.batches())


@pytest.mark.parametrize("separator", ["::", "||", " | ", ", ", "\t\t", "§", "<=>", "\x01", ".*"])
@pytest.mark.parametrize("quote", ['"', ""])
def test_separators_of_several_characters(tmp_path, separator, quote):
    (tmp_path / "a.csv").write_text("\n".join(",".join(row) for row in ROWS) + "\n")
    (tmp_path / "b.csv").write_text("\n".join(separator.join(row) for row in ROWS) + "\n")
    _, want = steps_of(tmp_path / "a.csv")
    data, steps = steps_of(tmp_path / "b.csv", separator=separator, quote=quote, block_bytes=300)
    assert contents(steps) == contents(want)
    position = Position.from_dict(steps[1][1].to_dict())
    assert contents(data.batches(position=position)) == contents(want[2:])
    (tmp_path / "c.csv").write_text("\n".join(separator.join(row) for row in ROWS[1:]) + "\n")
    _, steps = steps_of(tmp_path / "c.csv", separator=separator, quote=quote, columns=ROWS[0])
    assert contents(steps) == contents(want)


def test_a_separator_within_quotes_stays(tmp_path):
    (tmp_path / "a.csv").write_text('user::item::price::click\n"a::b"::"c ""d"" e"::1::0\n')
    _, ((batch, _),) = steps_of(tmp_path / "a.csv", separator="::")
    assert batch.ids.tolist() == ids_of(["a::b", 'c "d" e'])


def test_any_number_of_blanks(tmp_path):
    (tmp_path / "a.txt").write_text(
        "  user item\tprice   click \nu1   i1 0.5  1\n\n u2\t\ti2  1.5 0  \r\nu3 i3 2 1"
    )
    _, ((batch, _),) = steps_of(tmp_path / "a.txt", separator=r"\s+")
    assert batch.numeric[:, 0].tolist() == [0.5, 1.5, 2.0]
    assert batch.labels[:, 0].tolist() == [1, 0, 1]


def test_lines_of_other_lengths_are_bad_rows_with_their_number(tmp_path):
    (tmp_path / "a.dat").write_text("1::2::3::0\n1::2::0\n")
    with pytest.raises(DataError, match=r"a.dat, line 2: 3 cells: expected 4, separated by '::'"):
        steps_of(tmp_path / "a.dat", separator="::", columns=ROWS[0])


def test_the_byte_that_stands_for_a_separator_is_refused(tmp_path):
    (tmp_path / "a.dat").write_text("1::2\x1f::3::0\n")
    with pytest.raises(DataError, match="holds the byte 0x1f"):
        steps_of(tmp_path / "a.dat", separator="::", columns=ROWS[0])


def quoted(rows, newline):
    sink = io.StringIO()
    csv.writer(sink, lineterminator=newline, quoting=csv.QUOTE_MINIMAL).writerows(rows)
    return sink.getvalue()


def rows_with_breaks(seed, num_rows=200):
    """Rows whose texts have quotes, separators and line breaks, and the line that each begins on."""
    rng = np.random.default_rng(seed)
    marks = np.array(["\n", "\n\n", ",", '"', "a", "ü", " ", ',"\n', "\r\n", '"\n"'])
    texts = ["".join(rng.choice(marks, rng.integers(1, 6))) for _ in range(num_rows)]
    return [[f"u{r}", text, str(r / 4), str(r % 2)] for r, text in enumerate(texts)]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [40, 200, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_line_breaks_in_cells(tmp_path, newline, block_bytes, seed):
    rows = rows_with_breaks(seed)
    (tmp_path / "a.csv").write_bytes(quoted([ROWS[0], *rows], newline).encode())
    options = {"quoted_line_breaks": True, "block_bytes": block_bytes}
    data, steps = steps_of(tmp_path / "a.csv", **options)
    items = np.concatenate([batch.ids[batch.ids_of(1)] for batch, _ in steps])
    assert items.tolist() == ids_of([row[1] for row in rows])
    prices = np.concatenate([batch.numeric[:, 0] for batch, _ in steps])
    assert prices.tolist() == [r / 4 for r in range(len(rows))]
    for place in (0, 5):
        position = Position.from_dict(steps[place][1].to_dict())
        assert contents(data.batches(position=position)) == contents(steps[place + 1 :])
    shuffled, once = steps_of(tmp_path / "a.csv", shuffle=True, shuffle_rows=30, **options)
    position = once[3][1]
    assert contents(shuffled.batches(position=position)) == contents(once[4:])


@pytest.mark.parametrize("block_bytes", [40, 1 << 20])
def test_a_bad_row_after_line_breaks_has_its_line(tmp_path, block_bytes):
    head = quoted([ROWS[0], *rows_with_breaks(1)], "\n")
    (tmp_path / "a.csv").write_text(head + "u,i,many,0\n")
    line = head.count("\n") + 1
    with pytest.raises(DataError, match=rf"line {line}: column 'price' = 'many'"):
        steps_of(tmp_path / "a.csv", quoted_line_breaks=True, block_bytes=block_bytes)
    (tmp_path / "a.csv").write_text(head + "u,i,0\n")
    with pytest.raises(DataError, match=rf"line {line}: 3 cells: expected 4"):
        steps_of(tmp_path / "a.csv", quoted_line_breaks=True, block_bytes=block_bytes)


def test_a_header_with_a_line_break(tmp_path):
    (tmp_path / "a.csv").write_text('"user","the\nprice","click"\nu,many,0\n')
    schema = Schema([Categorical(name="user"), Numeric(name="p", column="the\nprice")], "click")
    with pytest.raises(DataError, match=r"line 3: column 'the.nprice' = 'many'"):
        list(girih.read_csv(tmp_path / "a.csv", schema, quoted_line_breaks=True))


def test_a_quote_within_an_unquoted_cell_opens_nothing(tmp_path):
    (tmp_path / "a.csv").write_text('user,item,price,click\n5" screen,i,1,0\n"a\nb",i,2,1\nu,3" pipe,3,0\n')
    _, ((batch, _),) = steps_of(tmp_path / "a.csv", quoted_line_breaks=True)
    assert batch.ids[batch.ids_of(0)].tolist() == ids_of(['5" screen', "a\nb", "u"])


def test_an_open_quote_says_what_to_set(tmp_path):
    (tmp_path / "a.csv").write_text('user,item,price,click\n"a\nb",i,2,1\n')
    with pytest.raises(
        DataError, match=r"line 2: a quote .* is not closed on its line; set quoted_line_breaks = true"
    ):
        steps_of(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text('user,item,price,click\nu,i,2,1\n"ab,i,2,1\nu,i,2,1\n')
    with pytest.raises(DataError, match='line 3: a quote " is not closed'):
        steps_of(tmp_path / "a.csv", quoted_line_breaks=True)


def test_a_quote_that_never_closes_takes_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST_ROW_BYTES", 1000)
    (tmp_path / "a.csv").write_text('user,item,price,click\n"ab' + "x,i,2,1\n" * 2000)
    with pytest.raises(DataError, match=r"line 2: a quote opens a cell of more than"):
        steps_of(tmp_path / "a.csv", quoted_line_breaks=True, block_bytes=100)


def test_positions_hold_for_one_dialect(tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(",".join(row) for row in ROWS) + "\n")
    _, steps = steps_of(tmp_path / "a.csv")
    data, _ = steps_of(tmp_path / "a.csv", quoted_line_breaks=True)
    with pytest.raises(girih.errors.ConfigError, match="position"):
        list(data.batches(position=steps[0][1]))


@pytest.mark.parametrize(
    "options",
    [
        {"quoted_line_breaks": True},
        {"encoding": "latin-1"},
        {"decimal": ",", "units": ["%"]},
        {"null_values": ["NA"]},
    ],
)
def test_a_loader_in_another_process_reads_the_same(tmp_path, options):
    (tmp_path / "a.csv").write_text(
        'user,item,price,click\n"a\nb",i,2,1\n' * 1 + "u,NA,3,0\n", encoding="latin-1"
    )
    if "quoted_line_breaks" not in options:
        (tmp_path / "a.csv").write_text("user,item,price,click\nu,NA,3,0\n")
    data, steps = steps_of(tmp_path / "a.csv", **options)
    assert contents(pickle.loads(pickle.dumps(data)).batches()) == contents(steps)
