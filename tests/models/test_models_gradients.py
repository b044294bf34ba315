"""Layers with gradients of their own, against torch's of the plain formula."""

import pytest
import torch

from girih.models.dlrm import PairwiseDots
from girih.models.layers.inputs import DenseInput
from girih.models.operators.products import SecondOrder, _Sums


def plain_dots(fields):
    rows, columns = torch.tril_indices(fields.shape[1], fields.shape[1], offset=-1)
    return (fields[:, rows] * fields[:, columns]).sum(2)


@pytest.mark.parametrize("shape", [(1, 1, 3), (4, 2, 3), (3, 7, 5), (0, 3, 2)])
def test_pairwise_dots(shape):
    torch.manual_seed(0)
    ours = torch.randn(shape, dtype=torch.double, requires_grad=True)
    plain = ours.detach().clone().requires_grad_()
    dots, expected = PairwiseDots(shape[1])(ours), plain_dots(plain)
    torch.testing.assert_close(dots, expected)
    gradient = torch.randn_like(expected)
    dots.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("function", [PairwiseDots(4), _Sums.apply], ids=["dots", "sums"])
def test_first_and_second_derivatives(function):
    torch.manual_seed(0)
    fields = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(function, fields)
    assert torch.autograd.gradgradcheck(function, fields)


def test_dots_under_autocast_are_bfloat16_products():
    torch.manual_seed(0)
    fields = torch.randn(64, 5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dots = PairwiseDots(5)(fields)
    assert dots.dtype == torch.bfloat16
    lowered = fields.detach().bfloat16().double().requires_grad_()
    expected = plain_dots(lowered)
    assert torch.equal(dots, expected.detach().bfloat16())
    gradient = torch.randn_like(expected).bfloat16()
    dots.backward(gradient)
    expected.backward(gradient.double())
    assert fields.grad.dtype == torch.float32
    torch.testing.assert_close(fields.grad.double(), lowered.grad, rtol=2**-7, atol=2**-7)


def test_fm_under_autocast_stays_float32():
    # ½ (‖Σ v‖² − Σ ‖v‖²) of equal fields with one tiny difference: bfloat16 sums would lose all of it
    from girih import Categorical, Schema
    from girih.models import Block, Embeddings

    schema = Schema([Categorical(name="a", dim=4), Categorical(name="b", dim=4)], "click")
    values = torch.randn(8, 2, 4)
    embeddings = Embeddings((Block(("a", "b"), values),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = SecondOrder(schema, 4)(torch.empty(8, 0), embeddings)
    expected = (values[:, 0] * values[:, 1]).sum(1, keepdim=True)
    torch.testing.assert_close(found, expected)


def test_inputs_of_products_are_joined_in_the_products_dtype():
    from girih import Categorical, Numeric, Schema
    from girih.models import Block, Embeddings

    schema = Schema([Categorical(name="a", dim=4), Numeric(name="x")], "click")
    embeddings, numeric = Embeddings((Block(("a",), torch.randn(3, 1, 4)),)), torch.randn(3, 1)
    expected = torch.cat([embeddings["a"], numeric], dim=1)
    lowering, plain = DenseInput(schema, for_products=True), DenseInput(schema)
    assert torch.equal(lowering(numeric, embeddings), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lowering(numeric, embeddings), expected.bfloat16())
        assert torch.equal(plain(numeric, embeddings), expected)
