"""What people who come from torch try with the drop-in modules, and the sentence that each gets."""

import copy
import pickle
import re

import pytest
import torch

import girih
from girih.errors import ConfigError

IDS = torch.tensor([[1, 2], [3, 4]])
NO_GRAPH = (
    "which no graph can hold: trace, script or export the layers after it, and compile without fullgraph"
)


def model_of(kind):
    return torch.nn.Sequential(kind(4, optimizer=girih.optim.SGD(lr=0.5)), torch.nn.Linear(4, 1))


@pytest.fixture(params=[girih.nn.Embedding, girih.nn.EmbeddingBag])
def model(request):
    return model_of(request.param)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    "capture",
    [
        lambda model: torch.jit.trace(model, IDS),
        torch.jit.script,
        lambda model: torch.export.export(model, (IDS,)),
        lambda model: torch.export.export(model, (IDS,), strict=False),
    ],
    ids=["trace", "script", "export", "export, not strict"],
)
def test_a_graph_of_a_model_with_growing_rows_is_refused(model, capture):
    with pytest.raises(ConfigError) as caught:
        capture(model.eval())
    assert str(caught.value) == f"{type(model[0]).__name__} reads rows of a table that grows, {NO_GRAPH}"


def test_compiled_models_leave_the_rows_out_of_the_graph(model):
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(IDS), model(IDS))
    before = model[0](IDS).detach().clone()
    compiled(IDS).sum().backward()
    assert not torch.equal(model[0](IDS), before)
    new = torch.tensor([[7, 8], [9, 10]])
    torch.testing.assert_close(compiled(new), model(new))


def test_a_compiled_graph_without_breaks_is_refused(model):
    torch.compiler.reset()
    with pytest.raises(Exception, match=f"a girih.nn module reads rows of a table that grows, {NO_GRAPH}"):
        torch.compile(model, backend="eager", fullgraph=True)(IDS)


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused(model, use):
    with pytest.raises(TypeError, match=r"neither copied nor pickled; load state_dict\(\) into a new module"):
        use(model[0] if use is copy.copy else model)


def test_saving_the_whole_model_is_refused(model, tmp_path):
    with pytest.raises(TypeError, match=r"neither copied nor pickled; load state_dict\(\)"):
        torch.save(model, tmp_path / "model.pt")


MOVED = [
    ("(1000, 16)", {}, (1000, 16), "rows appear as ids are seen; leave num_embeddings out, write {}(16)"),
    (
        ": num_embeddings",
        {"num_embeddings": 9, "embedding_dim": 8},
        (),
        "leave num_embeddings out, write {}(8)",
    ),
    (": embedding_dim", {"embedding_dim": 16}, (), "it is called dim; write {}(16)"),
    (": embedding_dim", {"embedding_dim": 16}, (1000,), "it is called dim; write {}(16)"),
    (": sparse", {"sparse": True}, (16,), "only the rows of a batch ever move; leave it out"),
    (": max_norm", {"max_norm": 1.0}, (16,), "rows are never renormalized; leave it out"),
    (
        ": scale_grad_by_freq",
        {"scale_grad_by_freq": True},
        (16,),
        "gradients of equal ids are summed; leave it out",
    ),
    (
        ": _weight",
        {"_weight": torch.zeros(9, 4)},
        (4,),
        "to take trained weights, call {}.from_torch(module)",
    ),
    (": device", {"device": "cpu"}, (4,), "module.cuda() takes rows to a GPU; leave it out"),
    (": unknown option", {"optimiser": None}, (4,), "'optimiser'; did you mean 'optimizer'?"),
]


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
@pytest.mark.parametrize(("where", "options", "given", "told"), MOVED, ids=[f"{m[0]}{m[2]}" for m in MOVED])
def test_arguments_of_torchs_modules_get_the_sentence_that_helps(kind, where, options, given, told):
    with pytest.raises(ConfigError) as caught:
        kind(*given, **options)
    text, name = str(caught.value), kind.__name__
    assert text.startswith(f"{name}{where}")
    assert text.endswith(told.format(name))
    assert "\n" not in text
    assert "Growing" not in text


def test_a_subclass_may_have_arguments_of_its_own():
    class Users(girih.nn.Embedding):
        def __init__(self, num_embeddings, embedding_dim):
            super().__init__(embedding_dim)

    assert Users(1000, embedding_dim=4)(IDS).shape == (2, 2, 4)


def test_attributes_of_torchs_modules_say_what_there_is(model):
    module = model[0]
    with pytest.raises(AttributeError, match=r"has no weight: .* call module\(ids\) under torch.no_grad\(\)"):
        _ = module.weight
    with pytest.raises(AttributeError, match="it is called dim"):
        _ = module.embedding_dim
    with pytest.raises(AttributeError, match="num_rows counts them"):
        _ = module.num_embeddings
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = module.weights
    with torch.no_grad():  # as the first of them says
        assert module(torch.tensor([[5]])).flatten().shape == (4,)
    assert module.num_rows == 0


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
@pytest.mark.parametrize(
    "other", [girih.nn.Embedding(4), girih.nn.EmbeddingBag(4), torch.nn.Linear(4, 4), "rows"]
)
def test_from_torch_takes_modules_of_torch_alone(kind, other):
    with pytest.raises(
        ConfigError, match=r"^from_torch: a .*, expected a torch.nn.Embedding.*; share=module uses .*"
    ):
        kind.from_torch(other)


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
@pytest.mark.parametrize("other", [torch.nn.Embedding(9, 4), torch.nn.EmbeddingBag(9, 4), 7])
def test_rows_are_shared_with_modules_of_girih_alone(kind, other):
    with pytest.raises(
        ConfigError, match=r"^share = a .*: expected a module of girih.nn; from_torch\(module\) takes"
    ):
        kind(4, share=other)


@pytest.mark.parametrize("kind", [girih.nn.Embedding, girih.nn.EmbeddingBag])
def test_an_optimizer_of_torch_is_named_by_its_class_alone(kind):
    theirs = torch.optim.Adam([torch.zeros(1)])
    told = "optimizer = a torch.optim.adam.Adam: expected one of girih.optim, as girih.optim.Adagrad(lr=0.05)"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        kind(4, optimizer=theirs)
