"""Reads files by plain :mod:`json`, struct and numpy; nothing of girih is imported here."""

import json

import numpy as np
from mutations import split

NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?",
}  # fmt: skip
BURIED = (1 << 40) - 2


def tensors(path):
    """The tensors of a safetensors file, by name, and its metadata."""
    header, data = split(path.read_bytes())
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = np.frombuffer(data[first:last], NUMPY[entry["dtype"]]).reshape(entry["shape"])
    return found, metadata


def dense(path):
    """Parameters as bytes by name."""
    return {name: (value.shape, value.tobytes()) for name, value in tensors(path)[0].items()}


def checkpoint(directory):
    tree = json.loads((directory / "manifest.json").read_text())
    found, _ = tensors(directory / "dense.safetensors")
    model = {name: found[item["$tensor"]] for name, item in tree["dense"]["model"].items()}
    rows = {}
    for name in tree["parts"]:
        if name == "dense.safetensors":
            continue
        columns, metadata = tensors(directory / name)
        described = json.loads(metadata["girih"])
        tables = [table["name"] for table in described["tables"]]
        for table, id, row in zip(columns["tables"], columns["ids"], columns["embedding"], strict=True):
            key = tables[table], int(id)
            assert key not in rows, f"{key} twice"
            rows[key] = row.tobytes()
    return {
        "step": tree["step"],
        "dense": {name: (value.shape, value.tobytes()) for name, value in model.items()},
        "rows": rows,
    }


def export(directory):
    tree = json.loads((directory / "signature.json").read_text())
    rows = {}
    for (each,) in tree["rows"]:
        assert "/" not in each["name"]
        found, metadata = tensors(directory / each["name"])
        tables = json.loads(metadata["girih"])["tables"]
        for id, word in found["index"].tolist():
            if word and (row := (word & ((1 << 40) - 1)) - 1) != BURIED:
                assert (tables[word >> 40], id) not in rows
                rows[tables[word >> 40], id] = found["rows"][row].tobytes()
    parameters = dense(directory / tree["dense"]["parameters"]["name"])
    return {"step": tree["step"], "dense": parameters, "rows": rows}


def log(root, number):
    """A version of a log, from its first snapshot on."""
    rows, at = {}, 0
    for kind, each in [("snapshots", 1), *(("segments", n) for n in range(2, number + 1))]:
        at = root / kind / f"{each:08d}"
        tree = json.loads((at / "manifest.json").read_text())
        for name in tree["parts"]:
            if name == "dense.safetensors":
                continue
            columns, metadata = tensors(at / name)
            described = json.loads(metadata["girih"])
            tables = described["tables"]
            for table, id in zip(columns["left_tables"], columns["left_ids"], strict=True):
                rows.pop((tables[table], int(id)), None)
            for table, id, row in zip(columns["tables"], columns["ids"], columns["rows"], strict=True):
                rows[tables[table], int(id)] = row.tobytes()
    return {"step": tree["step"], "dense": dense(at / "dense.safetensors"), "rows": rows}
