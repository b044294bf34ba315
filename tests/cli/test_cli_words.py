import click
import pytest

from girih.cli import cli


def spelled(line):
    """What click makes of a line, as a line with one word to each option."""
    name, *words = line.split()
    command = cli.get_command(None, name)
    values = command.make_context(name, words).params
    told = [name]
    for parameter in command.params:
        value = values[parameter.name]
        if isinstance(parameter, click.Argument):
            told.append(str(value))
        elif value:
            for each in value if parameter.multiple else [value]:
                told += [parameter.opts[-1]] + ([] if parameter.is_flag else [str(each)])
    return " ".join(told)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train c.toml --set a.b=1 c.d=2", "train c.toml --set a.b=1 --set c.d=2"),
        ("train --set a.b=1 c.d=2 c.toml", "train c.toml --set a.b=1 --set c.d=2"),
        ("train --set a.b=1 c.toml --resume", "train c.toml --set a.b=1 --resume"),
        ("train --set a.b=1 --set c.d=[2] c.toml", "train c.toml --set a.b=1 --set c.d=[2]"),
        ("train --run r c.toml --strategy local", "train c.toml --strategy local --run r"),
        ("train --resume c.toml --run r --set a=1 b=2", "train c.toml --set a=1 --set b=2 --run r --resume"),
        ("predict r --data a b --out o --keep x y", "predict r --data a --data b --out o --keep x --keep y"),
        ("predict --data a r --out o --keep x", "predict r --data a --out o --keep x"),
        ("predict --keep x r --data a --data b --out o", "predict r --data a --data b --out o --keep x"),
        ("evaluate r --data=a --data b c", "evaluate r --data a --data b --data c"),
        ("inspect r", "inspect r"),
    ],
)
def test_words_after_an_option_are_its_own_where_that_is_clear(given, expected):
    assert spelled(given) == expected


@pytest.mark.parametrize("given", ["evaluate r --data=a b", "inspect r s", "train c.toml d.toml --resume"])
def test_a_word_that_is_nobodys_is_refused(given):
    with pytest.raises(click.UsageError):
        spelled(given)
