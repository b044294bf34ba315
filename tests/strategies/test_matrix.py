"""The matrix of strategies itself: no variant lists a workload that no test asks for."""

from importlib import import_module
from pathlib import Path

import pytest
from matrix import ASKED, MARKS, VARIANTS

for file in Path(__file__).parent.glob("test_*.py"):
    if "from matrix import" in file.read_text() and file.name != Path(__file__).name:
        import_module(file.stem)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=str)
def test_each_workload_of_a_variant_is_asked_for(variant):
    assert {name for speed in MARKS for name in getattr(variant, speed).split()} <= ASKED


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=str)
def test_a_variant_says_which_run_it_equals_or_why_none(variant):
    assert variant.equals in VARIANTS or variant.unequal
