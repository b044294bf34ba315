"""Graphs that torch's compiler makes of each model, over batches of several sizes: the table in docs/gpu.md."""

import pytest
import torch
from zoo_cases import OPTIONS, build, features_for, inputs_for, schema_for, schema_of

from girih.dense.accel import compiled
from girih.schema import Categorical

# of torch's own tracing of autograd functions, and of tensors between two graphs
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
SEVERAL = {"star": 10, "can": 11, "atbrg": 11}
"""Models that look at their input's numbers on the host, as at lengths of histories, with the graphs that torch 2.13 makes."""
MANY = ("dsin", "dien")
"""Models whose layers go along histories, so that every batch is another computation."""


@pytest.fixture
def graphs(monkeypatch):
    """All graphs that are traced; they are computed as they are."""
    found = []

    def backend(graph, inputs, **_):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def compute(name, schema, sizes, graphs, packing):
    """Logits as they are and as compiled, for each size."""
    model = build(name, schema)
    compiling = compiled.CompiledModel(model)
    for seed, size in enumerate(sizes):
        inputs = inputs_for(model, schema, num_examples=size, packing=packing, seed=seed)
        logits = compiling(inputs.numeric, inputs.embeddings)
        torch.testing.assert_close(logits, model(inputs.numeric, inputs.embeddings))
    return len(graphs)


QUICK = ("dcnv2", "din")
ONE = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.heavy)
    for name in OPTIONS
    if name not in SEVERAL and name not in MANY
]


@pytest.mark.parametrize("name", ONE)
def test_one_graph_for_batches_of_all_sizes(name, graphs):
    schema = schema_for(name, features_for(name))
    assert compute(name, schema, (5, 8, 1, 3), graphs, "split") == 1


@pytest.mark.heavy
def test_features_of_several_widths_are_one_graph(graphs):
    """Their columns are taken from several blocks, slice by slice."""
    wide = [Categorical(name="device", dim=7), *features_for("dcn"), Categorical(name="brand", dim=7)]
    assert compute("dcn", schema_of(wide), (5, 8), graphs, "split") == 1


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "most"), SEVERAL.items())
def test_models_that_ask_for_numbers_are_several_graphs(name, most, graphs):
    schema = schema_for(name, features_for(name))
    assert 1 < compute(name, schema, (5, 9, 7, 12, 30), graphs, "split") <= most


@pytest.mark.heavy
@pytest.mark.parametrize("name", MANY)
def test_models_that_go_along_histories_are_many_graphs(name, graphs):
    assert compute(name, schema_for(name, features_for(name)), (5,), graphs, "split") > 8
