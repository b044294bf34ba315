"""Each public name has an example in its docstring, and examples print what they show."""

import doctest
import sys
from pathlib import Path
from unittest import mock

import griffe
import pytest

DEV = Path(__file__).parents[2] / "dev"
with mock.patch.object(sys, "path", [str(DEV), *sys.path]):
    import api

PUBLIC = dict(api.public_names(api.load()))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def needs_example(name, public):
    """False for constants, and for errors: the module has an example of them."""
    return not isinstance(public, griffe.Attribute) and not name.startswith("errors.")


def docstrings(public):
    """The docstring of a public name, and those of a class's own methods and properties."""
    members = public.members.values() if isinstance(public, griffe.Class) else ()
    return [each.docstring for each in (public, *members) if not each.is_alias and each.docstring]


@pytest.mark.parametrize("name", [name for name, public in PUBLIC.items() if needs_example(name, public)])
def test_an_example_prints_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS)
    texts = docstrings(PUBLIC[name])
    assert "Examples:" in texts[0].value, f"girih.{name} has no example"
    output = []
    for text in texts:
        test = parser.get_doctest(
            text.value, {}, f"girih.{name}", str(PUBLIC[name].filepath), text.lineno - 1
        )
        runner.run(test, out=output.append)
    if runner.failures:
        pytest.fail("".join(output), pytrace=False)
    assert runner.tries > 0
