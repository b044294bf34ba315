"""The page of the models: its Python runs, its TOML builds, its tables tell the truth."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest

from girih.models import BY_NAME, create
from girih.models.layers.mlp import MLP
from girih.schema import Schema

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
UNSET = (
    "attention",
    "rank",
    "relations",
    "co_action",
    "domain",
    "num_domains",
    "user",
    "item",
    "item_id",
    "log_q",
)
"""Options without a default, or of which none is to be shown."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def namespace():
    names = {"__name__": "docs_models"}
    for block in blocks("python"):
        exec(compile(block, "docs/models.md", "exec"), names)
    return names


def test_python_blocks_run(namespace):
    assert len(blocks("python")) >= 5
    assert namespace["padded"].shape == (3, 50, 8)


def test_toml_blocks_build(namespace, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = next(block for block in blocks("python") if "class Pair" in block)
    (tmp_path / "pair.py").write_text(own)
    built = []
    for block in blocks("toml"):
        content = tomllib.loads(block)
        schema, options = namespace["schema"], content["model"]
        if "features" in content:
            schema = Schema.from_dict(content | {"labels": {"names": ["click"]}})
        built.append(create(options.pop("name"), schema, options, directory=tmp_path))
    names = [type(model).__name__ for model in built]
    assert names == ["DCNv2", "DIN", "DIEN", "DSIN", "CAN", "STAR", "TwoTower", "Pair"]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_zoos_table_lists_every_option_and_its_default(name):
    row = next(
        line for line in PAGE.splitlines() if line.startswith(f"| `{name}` | `{BY_NAME[name].__name__}` |")
    )
    parameters = dict(inspect.signature(BY_NAME[name].__init__).parameters)
    del parameters["self"], parameters["schema"]
    shared = parameters.pop("deep", None)
    assert ("none at all" in row) == (not parameters and not shared)
    for option in parameters.keys() - {"hidden", "dropout", "batch_norm"}:
        default = parameters[option].default
        in_row = {"structure": "`structure = ", "similarity": "`similarity = ", "loss": "`loss = "}
        in_row |= {option: f"`{option}`" for option in UNSET}
        assert in_row.get(option, f"`{option} = {toml(default)}`") in row
    names = {"hidden", "dropout", "batch_norm"}
    in_layers = inspect.signature(MLP.__init__).parameters if shared else {}
    for option in (*(names & parameters.keys()), *(names & in_layers.keys())):
        default = (parameters if option in parameters else in_layers)[option].default
        assert f"| `{option}` | `{toml(default)}` |" in PAGE


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
