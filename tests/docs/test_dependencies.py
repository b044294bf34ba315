"""Ranges in pyproject.toml and pins in the constraints files agree."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = [Requirement(text) for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]
PRIVATE = {
    "numba": r"^from numba\.core ",
    "torch": r"\btorch\._[a-z]|[a-z]\._fx\b",
}
"""Packages and what shows that girih uses private names of theirs."""


def pins(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt", "constraints-oldest.txt"])
def test_pins_lie_in_the_ranges(name):
    versions = pins(name)
    named = [need for need in ALL if canonicalize_name(need.name) in versions]
    assert len(named) > 10
    for need in named:
        assert versions[canonicalize_name(need.name)] in need.specifier, need


def test_oldest_pins_are_the_lower_bounds():
    versions = pins("constraints-oldest.txt")
    for need in map(Requirement, PROJECT["dependencies"]):
        (bound,) = [part.version for part in need.specifier if part.operator == ">="]
        if need.name != "torch":  # too large for a test environment
            assert versions[canonicalize_name(need.name)].startswith(bound), need


@pytest.mark.parametrize("name", PRIVATE)
def test_packages_whose_private_names_are_used_have_an_upper_bound(name):
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert any(re.search(PRIVATE[name], text, re.MULTILINE) for text in sources)
    for need in (each for each in ALL if each.name == name):
        assert any(part.operator == "<" for part in need.specifier), need
