"""Modules whose rows are in GPU memory beside those in host memory: outputs, rows, state, moves."""

import contextlib
import copy
import gc
import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import girih
from girih.errors import ConfigError, NonFiniteError
from girih.kernels.gpu import jit
from girih.nn import growing_tables, inputs
from support.store_verbs import by_key

F = girih.Categorical
GPU = girih.StoreOptions(tiers=("gpu",))
ADAM = girih.optim.Adam(lr=0.1)
CUDA = torch.device("cuda", 0)


def pair(kind, *given, **options):
    """The same module with rows in host memory and in GPU memory."""
    options = {"optimizer": ADAM, "seed": 3, **options}
    return kind(*given, **options), kind(*given, **options, store=GPU)


def rows_of(module):
    return by_key(*(store for _, store in module.tables.shards.files()))


def assert_same(mine, expected, rtol=1e-5, atol=1e-6):
    assert mine.tables.on_gpu
    assert not expected.tables.on_gpu
    theirs, ours = rows_of(expected), rows_of(mine)
    assert ours.keys() == theirs.keys()
    for key, columns in theirs.items():
        for name, value in columns.items():
            np.testing.assert_allclose(ours[key][name], value, rtol=rtol, atol=atol, err_msg=f"{key} {name}")


def step(module, *given):
    """Forward and backward, by a gradient that differs from bag to bag; the output."""
    out = module(*given)
    (out * (1 + torch.arange(out.numel(), device=out.device).view(out.shape) % 7)).sum().backward()
    return out.detach().cpu()


RAGGED = torch.tensor([3, 3, -9, 10**15, 3, 5, 0]), torch.tensor([0, 0, 3, 6])  # empty, 3, 3, 1
MANY = torch.arange(20) % 7, torch.tensor([0, 19, 19])  # a bag above SHORT_BAG


@pytest.mark.parametrize("mode", ["sum", "mean", pytest.param("sqrtn", marks=pytest.mark.smoke)])
def test_bags_of_both_layouts_and_weights_are_the_cpus(mode):
    weights = torch.rand(7, generator=torch.Generator().manual_seed(0))
    cpu, gpu = pair(girih.nn.EmbeddingBag, 5, mode)
    for given in (RAGGED, (RAGGED[0].int(), RAGGED[1].int(), weights), (RAGGED[0][:6].view(2, 3),), MANY):
        torch.testing.assert_close(step(gpu, *given), step(cpu, *given), rtol=1e-5, atol=1e-6)
    assert gpu(*RAGGED).device == jit.device()
    cpu(*RAGGED)
    assert_same(gpu, cpu)
    assert gpu.tables.shards.counters() == cpu.tables.shards.counters()


@pytest.mark.parametrize(
    ("mode", "batch"),
    [
        ("sum", RAGGED),
        ("mean", RAGGED),
        pytest.param("sqrtn", MANY, marks=pytest.mark.smoke),
    ],
)
@pytest.mark.parametrize("learns", [True, False])
def test_weights_get_the_cpus_gradients(learns, mode, batch):
    given, own = [], []
    modules = pair(girih.nn.EmbeddingBag, 4, mode)
    for module in modules:
        weights = torch.linspace(-1, 2, len(batch[0]), dtype=torch.float64).requires_grad_()
        module(*batch, weights.detach()).sum().backward()  # rows have moved once
        given.append(step(module.train(learns), *batch, weights))
        own.append(weights.grad)
    torch.testing.assert_close(*given)
    torch.testing.assert_close(*own, rtol=1e-5, atol=1e-6)  # sums of float32
    assert_same(*reversed(modules))


def test_weights_of_two_uses_get_gradients_by_the_rows_that_each_saw():
    """The rows of the first use have moved by the second one's gradients before autograd comes to it."""
    own = []
    for module in pair(girih.nn.EmbeddingBag, 4, "sum"):
        weights = [torch.ones(7).requires_grad_() for _ in range(2)]
        outs = [module(*RAGGED, each) for each in weights]
        for out in reversed(outs):
            (out**2).sum().backward()
        own.append(torch.stack([each.grad for each in weights]))
    torch.testing.assert_close(*own, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own[1][0], own[1][1], rtol=0, atol=0)


@pytest.mark.smoke
def test_weights_of_several_features_get_gradients_and_those_left_out_are_one():
    features = (
        F(name="user", dim=4, pooling="sum"),
        F(name="item", dim=3, pooling="mean"),
        F(name="ad", dim=4),
    )
    ids = {
        "user": torch.tensor([[1, 2], [2, 3]]),
        "item": torch.tensor([[7, 7, 5], [8, 1, 7]]),
        "ad": torch.tensor([[1], [4]]),
    }
    own = []
    for module in pair(girih.nn.EmbeddingBagCollection, features):
        weights = {
            name: torch.rand(ids[name].shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for name in ("user", "item")
        }
        found = module(ids, per_sample_weights=weights)
        sum((each.cpu() ** 2).sum() for each in found.values()).backward()
        own.append([each.grad for each in weights.values()])
    for mine, expected in zip(*own, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_padding_last_offsets_and_any_shape_are_the_cpus():
    cpu, gpu = pair(girih.nn.EmbeddingBag, 4, "mean", padding_idx=3, include_last_offset=True)
    last = RAGGED[0], torch.tensor([0, 0, 3, 7])
    for given in (last, (torch.tensor([[3, 3], [3, 4]]), None, torch.rand(2, 2)), (torch.full((2, 2), 3),)):
        torch.testing.assert_close(step(gpu, *given), step(cpu, *given), rtol=1e-5, atol=1e-6)
    assert_same(gpu, cpu)
    for options in ({}, {"padding_idx": 1}):
        cpu, gpu = pair(girih.nn.Embedding, 4, **options)
        for ids in (torch.tensor([[[1, 2], [7, 1]]]), torch.tensor(1), torch.empty(2, 0, dtype=torch.long)):
            mine, expected = step(gpu, ids), step(cpu, ids)
            assert mine.shape == (*ids.shape, 4)
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        assert_same(gpu, cpu)


@pytest.mark.smoke
@pytest.mark.parametrize("named", [True, False])
def test_a_collection_of_several_groups_is_the_cpus(named):
    features = (
        F(name="user", dim=4, pooling="sum"),
        F(name="item", dim=3),
        F(name="seen", dim=3, table="item", pooling="sqrtn"),
        F(name="ad", dim=4),
    )
    cpu, gpu = pair(
        girih.nn.EmbeddingBagCollection,
        features,
        [girih.Table(name="item", eviction=girih.tables.LRU(max_rows=6))],
    )
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (4, 3), generator=generator)
        ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)])
        outs = []
        for module in (cpu, gpu):
            if named:
                names = [feature.name for feature in features]
                parts = ids.split(lengths.sum(1).tolist())
                given = {n: (i, own.cumsum(0) - own) for n, i, own in zip(names, parts, lengths, strict=True)}
                given["ad"] = torch.tensor([[1, 2], [2, 2], [4, 1]])
                found = module(given, per_sample_weights={"ad": torch.full((3, 2), 0.5)})
                out = torch.cat([found[name] for name in names], dim=1)
            else:
                out = module(ids, offsets, weights)
            (out**2).sum().backward()
            outs.append(out.detach().cpu())
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert_same(gpu, cpu)


@pytest.mark.smoke
def test_no_ids_no_bags_and_rows_that_are_only_read():
    cpu, gpu = pair(girih.nn.EmbeddingBag, 4)
    none, begin = torch.empty(0, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    for given in ((none, begin), (none, begin[:0]), (none.view(0, 3),), (none, begin, torch.empty(0))):
        assert torch.equal(step(gpu, *given), step(cpu, *given))
    ids = torch.tensor([[8], [9]])
    gc.disable()
    left = weakref.ref(gpu(none, begin))
    assert left() is None  # no cycle keeps a graph that was dropped
    gc.enable()
    with torch.no_grad():
        assert torch.equal(gpu(ids).cpu(), cpu(ids))
    assert torch.equal(gpu.eval()(ids).cpu(), cpu.eval()(ids))
    assert gpu.num_rows == 0
    collections = pair(girih.nn.EmbeddingBagCollection, [F(name="a", dim=4), F(name="b", dim=4)])
    for module in collections:
        assert module(none, begin[:1]).shape == (0, 2, 4)


@pytest.mark.smoke
def test_a_gradient_that_is_not_finite_is_raised_and_moves_no_row():
    _, gpu = pair(girih.nn.EmbeddingBagCollection, [F(name="a", dim=4), F(name="b", dim=2, table="c")])
    given = {"a": torch.tensor([[1], [2]]), "b": torch.tensor([[1], [2]])}
    out = gpu(given)
    before = rows_of(gpu)
    factors = torch.tensor([[1.0], [float("nan")]], device=out["b"].device)
    with pytest.raises(
        NonFiniteError, match="gradient of feature 'b' of EmbeddingBagCollection is NaN or infinite"
    ):
        (out["a"].sum() + (out["b"] * factors).sum()).backward()
    assert rows_of(gpu) == before
    assert gpu.tables.step == 0


@pytest.mark.smoke
def test_rows_move_with_their_optimizer_state_bit_for_bit_and_train_on():
    rows = {"eviction": girih.tables.LRU(max_rows=50), "admission": girih.tables.MinCount(count=2, cells=500)}
    module, other = (girih.nn.EmbeddingBag(4, "sum", optimizer=ADAM, **rows) for _ in range(2))
    ids = torch.arange(40).view(8, 5) % 13
    for each in (module, other):
        step(each, ids)
        step(each, ids[:2])
    before, counters = rows_of(module), module.tables.shards.counters()
    for _ in range(2):
        module.tables.move(CUDA)
        assert module.tables.on_gpu
        assert rows_of(module) == before
        torch.testing.assert_close(step(module, ids + 3), step(other, ids + 3), rtol=1e-5, atol=1e-6)
        assert_same(module, other)
        before = rows_of(module)
        module.cpu()
        assert not module.tables.on_gpu
        assert rows_of(module) == before
    after = module.tables.shards.counters()
    assert after.keys() == counters.keys()
    assert after["lookups"] > counters["lookups"] > 0


@pytest.mark.smoke
def test_modules_that_share_rows_move_together_from_and_to_any_number_of_shards():
    bag = girih.nn.EmbeddingBag(4, "sum", optimizer=ADAM, store=girih.StoreOptions(shards=3))
    same = girih.nn.Embedding(4, share=bag)
    ids = torch.arange(12)
    out = same(ids)
    step(bag, ids[:, None])
    before = rows_of(bag)
    model = torch.nn.ModuleDict({"same": same, "bag": bag})
    bag.tables.move(CUDA)
    assert rows_of(bag) == before
    assert torch.equal(same.eval()(ids).cpu(), bag.eval()(ids[:, None]).cpu())
    with pytest.raises(ConfigError, match="moved to another device between forward and backward"):
        out.sum().backward()
    assert "in GPU memory" in repr(model)
    assert model.cpu() is model
    assert bag.tables.shards.shards_each == 3
    assert "in GPU memory" not in repr(model)
    assert rows_of(bag) == before


class Somewhere:
    """What a module's ``to("cuda")`` makes of a tensor, where there is no GPU to make it."""

    def __init__(self, *_, **__):
        self.device = CUDA


@pytest.mark.smoke
@pytest.mark.parametrize("moved", [True, False])
def test_a_model_that_goes_to_a_gpu_takes_rows_along_but_those_told_where_to_be(monkeypatch, moved):
    monkeypatch.setattr(torch.Tensor, "cuda", Somewhere)
    bag = girih.nn.EmbeddingBag(4, store=None if moved else girih.StoreOptions(tiers=("dram",)))
    collection = girih.nn.EmbeddingBagCollection([F(name="a", dim=4)])
    model = torch.nn.Sequential(bag, collection).cuda()
    assert bag.tables.on_gpu == moved
    assert collection.tables.on_gpu
    shards = bag.tables.shards
    model.cuda()
    assert bag.tables.shards is shards
    assert bag(torch.tensor([[1]])).shape == (1, 4)


@pytest.mark.smoke
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to("cuda:1")])
def test_without_a_gpu_it_is_one_line_and_rows_stay(move):
    bag = girih.nn.EmbeddingBag(4)
    bag(torch.tensor([[1]]))
    with pytest.raises(
        ConfigError, match=r"^EmbeddingBag: its rows cannot be moved there: .* in host memory$"
    ) as caught:
        move(torch.nn.Sequential(bag))
    assert "\n" not in str(caught.value)
    assert bag.num_rows == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_cuda_moves_rows_and_ids_may_be_on_either_side(there):
    cpu, gpu = (girih.nn.EmbeddingBag(4, optimizer=ADAM) for _ in range(2))
    gpu.cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        for given in (RAGGED, (RAGGED[0][:6].view(2, 3),), MANY):
            torch.testing.assert_close(step(gpu, *(each.to(there) for each in given)), step(cpu, *given))
    assert gpu(RAGGED[0].to(there), RAGGED[1]).is_cuda
    cpu(*RAGGED)
    assert_same(gpu, cpu)
    with pytest.raises(ConfigError, match="expected to rise from 0 to the 7 ids"):
        gpu(RAGGED[0].to(there), torch.tensor([0, 5, 2], device=there))


@pytest.mark.smoke
def test_state_goes_from_one_side_to_the_other():
    cpu, gpu = pair(girih.nn.EmbeddingBag, 4)
    step(cpu, *RAGGED)
    gpu.load_state_dict(cpu.state_dict())
    assert rows_of(gpu) == rows_of(cpu)
    assert gpu.tables.step == 1
    step(gpu, *RAGGED)
    cpu.load_state_dict(gpu.state_dict())
    assert rows_of(gpu) == rows_of(cpu)


@pytest.mark.smoke
def test_assign_from_torch_and_refusals_are_the_cpus():
    theirs = torch.nn.EmbeddingBag(6, 4, mode="sum")
    gpu = girih.nn.EmbeddingBag.from_torch(theirs, optimizer=girih.optim.SGD(lr=0.5), store=GPU)
    assert gpu.tables.on_gpu
    torch.testing.assert_close(gpu(torch.arange(6)[:, None]).cpu(), theirs.weight.detach())
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(gpu)
    with pytest.raises(ConfigError, match="expected to rise from 0 to the 2 ids"):
        gpu(torch.tensor([1, 2]), torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match=r"gpu.*takes neither arena nor several shards"):
        girih.nn.EmbeddingBag(4, store=girih.StoreOptions(tiers=("gpu",), shards=2))


class There(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.smoke
def test_what_the_host_asks_a_gpu_of_offsets_comes_by_one_copy(monkeypatch):
    copies = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(There, "cpu", lambda self: copies.append(self.shape) or cpu(self), raising=False)
    told = [
        torch.full((4, 1), 7),
        torch.arange(8).view(4, 2).as_subclass(There),
        torch.ones(4, 1).as_subclass(There),
    ]
    found = inputs._copy_to_host(told)
    assert [np.asarray(each).tolist() for each in found] == [each.tolist() for each in told]
    assert copies == [(4, 3)]


@pytest.mark.smoke
def test_a_stream_that_comes_to_rows_waits_for_the_one_before(monkeypatch):
    _, gpu = pair(girih.nn.EmbeddingBag, 4, eviction=girih.tables.LRU(max_rows=9))
    waits, kept, capturing, now = [], [], [False], [None]
    streams = [SimpleNamespace(wait_stream=lambda other, n=n: waits.append((n, other))) for n in range(2)]
    monkeypatch.setattr(growing_tables, "torch", SimpleNamespace(cuda=SimpleNamespace(
        device=contextlib.nullcontext, current_stream=lambda: now[0],
        is_current_stream_capturing=lambda: capturing[0],
    )))  # fmt: skip
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.append((id(tensor), stream))
    )
    gpu.tables._last_stream = streams[0]
    for stream in (0, 1, 1, 0):
        now[0] = streams[stream]
        with gpu.tables.used():
            pass
    assert waits == [(1, streams[0]), (0, streams[1])]
    state = gpu.tables.shards.stores[0][0].state
    held = [state.memory.slots, state.memory.words, *state.memory.rows._records, state.kernels.segments.seeds]
    held += [gpu._bags.groups[0]._bags._modes, state.rows._oldest[0]._rows]
    assert {id(tensor) for tensor in held} <= {tensor for tensor, stream in kept if stream is streams[1]}
    capturing[0] = True
    with pytest.raises(ConfigError, match="leave it out of a CUDA graph"), gpu.tables.used():
        pass


@pytest.mark.smoke
def test_the_docs_say_where_rows_go():
    with pytest.raises(ConfigError, match=re.escape("module.cuda() takes rows to a GPU; leave it out")):
        girih.nn.EmbeddingBag(4, device="cuda")
