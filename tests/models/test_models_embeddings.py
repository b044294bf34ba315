from __future__ import annotations

import pytest
import torch

from girih.models import Block, Embeddings, Jagged


def block(names, dim=2, start=0.0):
    values = torch.arange(3.0 * len(names) * dim).view(3, len(names), dim) + start
    return Block(tuple(names), values)


def test_one_block_is_not_copied():
    one = block("abc")
    embeddings = Embeddings((one,))
    assert embeddings.stacked().data_ptr() == one.values.data_ptr()
    assert embeddings.stacked("abc").data_ptr() == one.values.data_ptr()
    assert embeddings.concatenated(["a", "b", "c"]).data_ptr() == one.values.data_ptr()
    assert embeddings["b"].equal(one.values[:, 1])


def test_views_follow_the_names_and_join_neighbours():
    first, second = block("acd"), block("b", start=100)
    embeddings = Embeddings((first, second))
    views = embeddings.views("abcd")
    assert [view.shape[1] for view in views] == [1, 1, 2]
    for view, values in zip(views, (first, second, first), strict=True):
        assert view.untyped_storage().data_ptr() == values.values.untyped_storage().data_ptr()
    assert torch.cat(views, 1).equal(torch.stack([embeddings[name] for name in "abcd"], 1))
    assert embeddings.stacked("abcd").equal(torch.cat(views, 1))
    assert embeddings.stacked("dc").equal(torch.stack([embeddings["d"], embeddings["c"]], 1))
    assert embeddings.views("cd")[0].equal(first.values[:, 1:])
    assert embeddings.views("aa")[0].shape[1] == 1


def test_block_order_without_names():
    embeddings = Embeddings((block("b"), block("ac", dim=3)), first_order=(block("b", 1), block("ac", 1)))
    assert embeddings.concatenated().shape == (3, 8)
    assert embeddings.concatenated("abc")[:, :3].equal(embeddings["a"])
    assert embeddings.first_order_weights().shape == (3, 3)


def test_what_is_missing_is_named():
    embeddings = Embeddings((block("ab"),))
    for read in (lambda: embeddings["c"], lambda: embeddings.views("ac")):
        with pytest.raises(KeyError, match="'c'"):
            read()
    with pytest.raises(ValueError, match=r"dims \[2, 3\]"):
        Embeddings((block("a"), block("b", dim=3))).stacked()
    for read in (Embeddings().stacked, Embeddings().concatenated, Embeddings().first_order_weights):
        with pytest.raises(ValueError, match="embeddings"):
            read()


@pytest.mark.parametrize("max_length", [None, 1, 2, 5])
def test_padded_keeps_the_last_ids(max_length):
    values = torch.arange(1.0, 13.0).view(6, 2).requires_grad_()
    jagged = Jagged(values, torch.tensor([0, 3, 3, 4, 6]))
    padded, mask = jagged.padded(max_length)
    width = max_length or 3
    assert padded.shape == (4, width, 2)
    for b, (begin, end) in enumerate([(0, 3), (3, 3), (3, 4), (4, 6)]):
        kept = values[max(begin, end - width) : end]
        assert mask[b].tolist() == [m < len(kept) for m in range(width)]
        assert padded[b, : len(kept)].equal(kept)
        assert not padded[b, len(kept) :].any()
    padded.sum().backward()
    lost = max(0, 3 - width)  # ids of the first sequence
    assert values.grad[:, 0].tolist() == [0.0] * lost + [1.0] * (3 - lost + 1) + [float(width > 1), 1.0]


def test_padded_of_nothing():
    padded, mask = Jagged(torch.zeros(0, 2), torch.zeros(4, dtype=torch.long)).padded()
    assert padded.shape == (3, 1, 2)
    assert not mask.any()
    padded, mask = Jagged(torch.zeros(0, 2), torch.zeros(1, dtype=torch.long)).padded()
    assert padded.shape == (0, 1, 2)
    padded, mask = Jagged(torch.zeros(0, 2), torch.zeros(4, dtype=torch.long)).padded(5)
    assert padded.shape == (3, 5, 2)
    assert not padded.any()
    assert not mask.any()


def test_examples_of_ids():
    jagged = Jagged(torch.zeros(5, 2), torch.tensor([0, 2, 2, 5]))
    assert jagged.examples().tolist() == [0, 0, 2, 2, 2]
    assert Jagged(torch.zeros(0, 2), torch.tensor([0, 0])).examples().tolist() == []


@pytest.mark.parametrize("dims", [(2, 2), (2, 3)])
def test_features_in_disorder_are_gathered_at_once(dims):
    """Equal to slices, as are their gradients; a block that is not read has none."""
    names = "abcdefghij"
    blocks = [block(names[::2], dims[0]), block(names[1::2], dims[1], start=100), block("xy")]
    for each in blocks:
        each.values.requires_grad_()
    embeddings = Embeddings(tuple(blocks))
    (found,) = embeddings.columns(names)
    assert found.equal(torch.cat([embeddings[name] for name in names], 1))
    if dims[0] == dims[1]:
        (stacked,) = embeddings.views(names)
        assert stacked.equal(torch.stack([embeddings[name] for name in names], 1))
    else:
        with pytest.raises(ValueError, match=r"dims \[2, 3\]"):
            embeddings.stacked(names)
    weights = torch.arange(1.0, found.shape[1] + 1)
    (found * weights).sum().backward()
    gradients = [each.values.grad for each in blocks]
    for each in blocks:
        each.values.grad = None
    (torch.cat([embeddings[name] for name in names], 1) * weights).sum().backward()
    for gradient, each in zip(gradients[:2], blocks, strict=False):
        assert gradient.equal(each.values.grad)
    assert gradients[2] is None
