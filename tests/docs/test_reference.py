"""Facts of the reference pages: each option of a public name, and each key of a config, has a type, a default and a meaning."""

import sys
from pathlib import Path
from unittest import mock

import pytest

import girih
from girih.app.run_config import SECTIONS
from girih.dense.options import optimizer_factory
from girih.strategies import create

ROOT = Path(__file__).parents[2]
with mock.patch.object(sys, "path", [str(ROOT / "dev"), *sys.path]):
    import build_docs
    import docs_keys
    import docs_options


def keys():
    """The rows of the page of keys: key, type, default and meaning."""
    lines = [line for line in "".join(docs_keys.key_lines()).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_key_of_a_config_has_a_type_a_default_and_a_meaning():
    rows = keys()
    assert [row for row in rows if len(row) != 4 or not all(row)] == []
    assert {
        f"`{name}`" for name in ("staleness", "lr", "padding_id", "max_rows", "hidden", "by", "patience")
    } <= {row[0] for row in rows}
    page = "".join(docs_keys.key_lines())
    assert [name for name in SECTIONS if f"{{ #{name} }}" not in page] == []


def test_a_key_without_a_meaning_fails(monkeypatch):
    monkeypatch.setattr(
        girih.EarlyStopping, "__doc__", "Ends training.\n\nAttributes:\n    metric: a metric.\n"
    )
    with pytest.raises(LookupError, match="EarlyStopping: no meaning of mode"):
        keys()


def test_a_section_without_keys_fails(monkeypatch):
    monkeypatch.setattr(docs_keys, "SECTIONS", (*SECTIONS, "new"))
    with pytest.raises(LookupError, match="differ from the sections of a config: new"):
        keys()


def test_defaults_of_names_are_those_of_the_code():
    assert create({}, "").name == docs_keys.CHOICES["strategy"][1]
    assert docs_keys.OPTIMIZERS[docs_keys.CHOICES["dense_optimizer"][1]] is optimizer_factory({}).args[0]


def test_each_option_of_a_public_name_has_a_meaning():
    lost = [
        (name, option.name)
        for name, target in docs_options.public_names().items()
        for option in docs_options.options_of(target)
        if not option.meaning
    ]
    assert lost == []


def test_options_are_those_of_the_signature_with_those_of_bases():
    options = {option.name: option for option in docs_options.options_of(girih.Hybrid)}
    assert options["loaders"].default == 1
    assert options["staleness"].meaning.startswith("τ")
    csv = {option.name: option for option in docs_options.options_of(girih.read_csv)}
    assert (csv["batch_size"].default, csv["separator"].default, csv["columns"].default) == (4096, ",", None)
    assert csv["paths"].default is docs_options.REQUIRED
    model = {option.name: option.default for option in docs_options.options_of(girih.models.DNN)}
    assert model == {
        "schema": docs_options.REQUIRED,
        "hidden": (400, 400, 400),
        "dropout": 0.0,
        "batch_norm": False,
    }


def test_types_have_neither_bounds_nor_modules():
    kinds = {
        option.name: docs_options.plain_type(option.hint) for option in docs_options.options_of(girih.Table)
    }
    assert kinds["dim"] == "int | None"
    assert kinds["eviction"] == "LRU | LFU | TTL | Fixed | None"
    assert kinds["dtype"] == "Literal['float32', 'bfloat16', 'float16']"


def test_a_name_without_a_guide_fails():
    with pytest.raises(LookupError, match="Unlisted: no guide"):
        build_docs.write_page("Unlisted", "girih.Unlisted", "girih.Unlisted", [])
    guided = {name for names in build_docs.GUIDE_OF.values() for name in names.split()}
    names = build_docs.page_names(build_docs.load())
    assert {*names, *(kind.__name__ for kind in docs_options.TYPES)} == guided
    assert [guide for guide in build_docs.GUIDE_OF if not (ROOT / "docs" / guide).is_file()] == []
