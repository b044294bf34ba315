import pytest

from girih.cli.words import spread


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train c.toml --set a.b=1 c.d=2", "train c.toml --set a.b=1 --set c.d=2"),
        ("train --set a.b=1 c.toml --resume", "train --set a.b=1 c.toml --resume"),
        ("train --set a.b=1 --set c.d=[2] c.toml", "train --set a.b=1 --set c.d=[2] c.toml"),
        ("train --run r c.toml --strategy local", "train --run r c.toml --strategy local"),
        ("predict r --data a b --out o --keep x y", "predict r --data a --data b --out o --keep x --keep y"),
        ("predict --data a r --out o --keep x", "predict --data a r --out o --keep x"),
        ("predict --keep x r --data a --data b", "predict --keep x r --data a --data b"),
        ("evaluate r --data=a b", "evaluate r --data=a b"),
        ("inspect r", "inspect r"),
        ("", ""),
    ],
)
def test_words_after_an_option_are_its_own_where_that_is_clear(given, expected):
    assert spread(given.split()) == expected.split()
