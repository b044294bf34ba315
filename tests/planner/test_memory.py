"""Memory of a run's roles, by hand, and what is refused before it starts."""

from dataclasses import replace

import pytest
from test_speed import facts

from girih import cli
from girih.errors import ConfigError
from girih.planner import memory
from girih.planner.facts import TableFacts
from girih.strategies import BY_NAME

ONE_GROUP = {"groups": 1, "servers_per_group": 0, "dense_servers": 0}
TABLES = (TableFacts(name="a", row_bytes=50, max_rows=1000), TableFacts(name="b", row_bytes=70))


def test_rows_and_copies_are_counted_by_role():
    """10,000 parameters of 4 bytes; Adam's state makes four copies of them."""
    known = facts(2, tables=TABLES)
    assert memory.account(known, **ONE_GROUP) == {
        "embedding-server": {"a": 50_000.0},
        "trainer": {"dense parameters": 2 * 40_000 * 4},
    }
    found = memory.account(known, groups=2, servers_per_group=2, dense_servers=1)
    assert found["trainer"] == {"dense parameters": 2 * 40_000}
    assert found["group-server"] == {"dense parameters": 2 * 40_000 * 4}
    assert found["dense-server"] == {"dense parameters": 40_000}
    unmeasured = memory.account(replace(known, dense_cost=None), **ONE_GROUP)
    assert unmeasured["trainer"] == {"dense parameters": 2 * 40_000 * 2}


def test_a_table_that_fits_nowhere_is_named_with_what_would_fit():
    strategy = BY_NAME["hierarchical"](groups=2)
    of_others = 2 * 40_000 * 4 + 40_000  # the trainers' copies, and the average
    known = facts(2, tables=TABLES, free_bytes=of_others + 20_000.0)
    with pytest.raises(ConfigError, match=r"table 'a' fits nowhere: its 1,000 rows .* at most 400,"):
        strategy.plan(
            replace(
                known,
                tables=(replace(TABLES[0], max_rows=1000, row_bytes=50 * 1000),),
                free_bytes=of_others + 2e7,
            )
        )
    small = replace(known, tables=(replace(TABLES[0], max_rows=400),))
    assert strategy.plan(small).strategy == "hierarchical"
    assert strategy.plan(replace(known, free_bytes=None)).strategy == "hierarchical"  # several hosts


def test_dense_copies_that_fit_nowhere_are_named():
    strategy = BY_NAME["hierarchical"](groups=2)
    with pytest.raises(ConfigError, match=r"dense parameters fit nowhere: .* in all trainer processes"):
        strategy.plan(facts(2, free_bytes=1e5))


def test_a_config_that_fits_nowhere_is_refused_in_one_line(log_directory, capsys):
    config = log_directory / "config.toml"
    most = 1 << 40  # rows of some 60 bytes each: no machine has that
    text = config.read_text().replace(
        'name = "user"\nkind = "categorical"\ndim = 4', 'name = "user"\nkind = "categorical"\ntable = "users"'
    )
    table = f'[[tables]]\nname = "users"\ndim = 4\neviction = {{ name = "lru", max_rows = {most} }}\n'
    config.write_text(text.replace("[labels]", f"{table}[labels]"))
    assert cli.run(["plan", str(config), "--strategy", "hierarchical", "--set", "strategy.groups=2"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert f"table 'users' fits nowhere: its {most:,} rows (max_rows)" in told
    assert "set its max_rows to at most" in told
    assert cli.run(["plan", str(config), "--strategy", "hybrid"]) == 0  # which takes it for a bound
