"""Models of sequences beside their naive twins, gradients and losses included, and the layers that they are made of."""

from __future__ import annotations

import copy
from itertools import accumulate

import naive_models as naive
import pytest
import torch
from torch import nn

from girih.errors import DataError
from girih.models import DIEN, Block, Embeddings, Jagged, create, needs_of
from girih.models.dien import auxiliary_losses
from girih.models.dsin import cut_sessions
from girih.models.layers.recurrent import GRU, BiLSTM, Steps
from girih.models.loss import Targets
from girih.schema import Categorical, Numeric, Schema, Sequence

SCHEMA = Schema(
    [
        Categorical(name="user", dim=4),
        Categorical(name="item", dim=4),
        Numeric(name="age"),
        Sequence(name="seen", table="item"),
        Sequence(name="tags", dim=4),
    ],
    "click",
)
GRAPH = Schema(
    [*SCHEMA.features, Sequence(name="near", table="item"), Sequence(name="kinds", dim=4)], "click"
)
PAIRS = {"attention": {"seen": "item", "tags": "user"}, "hidden": [5]}
OPTIONS = {
    "dien": PAIRS | {"auxiliary": 0.7},
    "dsin": PAIRS | {"session_length": 2, "max_sessions": 2, "heads": 2},
    "atbrg": PAIRS
    | {"relations": {"near": "item", "kinds": "seen"}, "softmax": True, "attention_hidden": [3]},
}
LENGTHS = [[0, 0, 0], [1, 1, 1], [0, 1, 5], [3, 0, 4, 2, 1, 6]]


def build(name, lengths):
    torch.manual_seed(4)
    schema = GRAPH if name == "atbrg" else SCHEMA
    model = create(name, schema, OPTIONS[name]).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    relations = getattr(model, "relations", None)
    inputs = naive.make_inputs(
        schema, needs_of(model, schema), len(lengths), lengths=lengths, relations=relations
    )
    labels = (torch.arange(len(lengths)) % 2).double()[:, None]
    return model, inputs, Targets(labels, None)


def gradients_of(module, model, inputs, targets):
    logits = module(inputs.numeric, inputs.embeddings)
    loss = (
        module.loss(logits, targets) if hasattr(module, "loss") else naive.Twin.loss(module, logits, targets)
    )
    leaves = [*inputs.leaves.values(), *model.parameters()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        logits,
        loss,
        *(torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)),
    ]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_logits_loss_and_gradients_are_those_of_the_naive_twin(name, lengths):
    model, inputs, targets = build(name, lengths)
    if name != "dien":
        model.auxiliary = 0.0  # for the twin's loss
    expected = gradients_of(naive.Twin(name, model), model, inputs, targets)
    found = gradients_of(model, model, inputs, targets)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
    close = {"rtol": 1e-5, "atol": 1e-7} if name == "dien" else {"rtol": 1e-9, "atol": 1e-11}
    for ours, theirs in zip(found[1:], expected[1:], strict=True):  # girih takes cross-entropy in float32
        torch.testing.assert_close(ours, theirs, check_dtype=False, **close)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_without_ids_or_examples_gives_every_parameter_a_gradient(name):
    for lengths in ([0, 0], []):
        model, inputs, _ = build(name, lengths)
        logits = model(inputs.numeric, inputs.embeddings)
        assert logits.shape == (len(lengths), 1)
        logits.sum().backward()
        for where, parameter in model.named_parameters():
            assert parameter.grad is not None, where
            assert torch.isfinite(parameter.grad).all(), where


def test_the_auxiliary_loss_is_for_training_alone_and_taken_once():
    model, inputs, targets = build("dien", [2, 3, 1])
    logits = model(inputs.numeric, inputs.embeddings)
    plain = nn.functional.binary_cross_entropy_with_logits(logits, targets.labels)
    assert model.loss(logits, targets) > plain + 0.01
    torch.testing.assert_close(model.loss(logits, targets), plain, check_dtype=False)
    for silent in (model.eval(), DIEN(SCHEMA, auxiliary=0, **PAIRS).double()):
        logits = silent(inputs.numeric, inputs.embeddings)
        plain = nn.functional.binary_cross_entropy_with_logits(logits, targets.labels)
        torch.testing.assert_close(silent.loss(logits, targets), plain, check_dtype=False)


def test_a_model_is_copied_after_a_forward_pass_whose_loss_never_came():
    model, inputs, _ = build("dien", [2, 3])
    logits = model(inputs.numeric, inputs.embeddings)
    torch.testing.assert_close(copy.deepcopy(model)(inputs.numeric, inputs.embeddings), logits)


def test_an_example_of_weight_two_counts_twice_in_the_auxiliary_loss():
    model, inputs, targets = build("dien", [2, 3, 2])
    losses = auxiliary_losses(torch.ones(7, 4), Jagged(torch.randn(7, 4), torch.tensor([0, 2, 5, 7])))
    assert losses.min() > 0
    logits = model(inputs.numeric, inputs.embeddings)
    model._left_for_loss = losses
    weights = torch.tensor([2.0, 1.0, 0.0])
    total = model.loss(logits.detach(), Targets(targets.labels, weights))
    plain = model.loss(logits.detach(), Targets(targets.labels, weights))
    expected = 0.7 * (2 * losses[0] + losses[1]) / 3
    torch.testing.assert_close(total - plain, expected, check_dtype=False)


def test_negatives_are_the_next_examples_ids_at_the_same_place():
    """Each id has a column of its own, so that the products with it are read off."""
    history = Jagged(torch.eye(7), torch.tensor([0, 3, 4, 6, 7]))  # ids 0 1 2 | 3 | 4 5 | 6
    interests = torch.zeros(7, 7)
    interests[0, 5] = -20.0  # example 0 tells id 1 from id 5, which is sure to be none
    interests[4, 1] = 20.0  # example 2 tells id 5 from id 1, and takes that one for its own
    losses = auxiliary_losses(interests, history)
    half = torch.tensor(0.5).log()
    torch.testing.assert_close(losses, torch.stack([-half, 0 * half, 20 - half, 0 * half]))


def test_the_oldest_sessions_are_left_out():
    model, inputs, _ = build("dsin", [1, 7, 4])
    model(inputs.numeric, inputs.embeddings).square().sum().backward()
    read = inputs.embeddings.sequences["seen"].values.grad.abs().sum(dim=1) > 0
    assert read.tolist() == [True, False, False, False, True, True, True, True, True, True, True, True]


def test_sessions_are_cut_from_the_newest_id():
    history = Jagged(torch.arange(1.0, 9.0)[:, None], torch.tensor([0, 5, 5, 8]))
    found = cut_sessions(history, 2, 2)
    assert found.values[..., 0].tolist() == [[2, 3], [4, 5], [6, 0], [7, 8]]
    assert found.mask.tolist() == [[True, True], [True, True], [True, False], [True, True]]
    assert found.ages.tolist() == [1, 0, 1, 0]
    assert found.offsets.tolist() == [0, 2, 2, 4]


def test_neighbours_that_cannot_be_shared_out_are_refused():
    model, inputs, _ = build("atbrg", [2, 3])
    kinds = inputs.embeddings.sequences["kinds"]
    inputs.embeddings.sequences["kinds"] = Jagged(kinds.values, torch.tensor([0, 5, 10]))
    with pytest.raises(
        DataError,
        match="'kinds' has 5 ids where 'seen' has 2; expected the same number of neighbours for each",
    ):
        model(inputs.numeric, inputs.embeddings)


def test_a_target_without_neighbours_is_itself_and_no_more():
    """Without any neighbour an extractor sees the node alone, whatever the relations are."""
    model, inputs, _ = build("atbrg", [0, 0])
    before = model(inputs.numeric, inputs.embeddings)
    nn.init.normal_(model.relation_vectors)
    torch.testing.assert_close(model(inputs.numeric, inputs.embeddings), before)


def test_steps_take_the_longest_first():
    steps = Steps.of(Jagged(torch.zeros(6, 1), torch.tensor([0, 2, 2, 5, 6])))
    assert steps.order.tolist() == [2, 0, 5, 3, 1, 4]
    assert steps.sizes == [3, 2, 1]
    rows = torch.arange(6)
    assert steps.joined(list(steps.split(rows))).equal(rows)
    assert Steps.of(Jagged(torch.zeros(0, 1), torch.tensor([0, 0]))).sizes == [0]


def jagged(lengths, dim):
    return Jagged(torch.randn(sum(lengths), dim), torch.tensor([0, *accumulate(lengths)]))


def test_gru_equals_torchs():
    torch.manual_seed(0)
    ours, theirs, sequences = GRU(3, 4), nn.GRU(3, 4), jagged([2, 4, 1], 3)
    with torch.no_grad():  # torch's gates are (reset, 1 − update, new), and it has a second bias
        for mine, other in ((ours.inputs, "ih"), (ours.states, "hh")):
            update, reset, new = mine.weight.chunk(3)
            getattr(theirs, f"weight_{other}_l0").copy_(torch.cat([reset, -update, new]))
        update, reset, new = ours.inputs.bias.chunk(3)
        theirs.bias_ih_l0.copy_(torch.cat([reset, -update, new]))
        theirs.bias_hh_l0.zero_()
    found = ours(sequences.values, Steps.of(sequences))
    for begin, end in ((0, 2), (2, 6), (6, 7)):
        torch.testing.assert_close(found[begin:end], theirs(sequences.values[begin:end])[0])


def test_bilstm_equals_torchs():
    torch.manual_seed(0)
    ours, theirs, sequences = BiLSTM(3, 4), nn.LSTM(3, 4, bidirectional=True), jagged([2, 0, 4, 1], 3)
    with torch.no_grad():  # torch's gates are (enter, forget, new, show), and it has a second bias
        for direction, suffix in ((ours.forwards, ""), (ours.backwards, "_reverse")):
            for mine, other in ((direction.inputs.weight, "weight_ih"), (direction.states.weight, "weight_hh"),
                                (direction.inputs.bias, "bias_ih")):  # fmt: skip
                enter, forget, show, new = mine.chunk(4)
                getattr(theirs, f"{other}_l0{suffix}").copy_(torch.cat([enter, forget, new, show]))
            getattr(theirs, f"bias_hh_l0{suffix}").zero_()
    found = ours(sequences)
    for begin, end in ((0, 2), (2, 6), (6, 7)):
        torch.testing.assert_close(found[begin:end], theirs(sequences.values[begin:end])[0])


def test_attention_of_one_is_a_plain_gru_and_of_none_keeps_the_state():
    torch.manual_seed(0)
    layer, sequences = GRU(3, 4), jagged([3, 2], 3)
    steps = Steps.of(sequences)
    plain = layer(sequences.values, steps)
    torch.testing.assert_close(layer(sequences.values, steps, torch.ones(5)), plain)
    first = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    assert layer(sequences.values, steps, first).equal(plain[[0, 0, 0, 3, 3]])


def test_last_vectors():
    values = torch.arange(1.0, 7.0).view(3, 2).requires_grad_()
    last = Jagged(values, torch.tensor([0, 0, 2, 3, 3])).last()
    assert last.tolist() == [[0, 0], [3, 4], [5, 6], [0, 0]]
    last.sum().backward()
    assert values.grad.tolist() == [[0, 0], [1, 1], [1, 1]]


def test_layers_under_bfloat16_autocast_keep_their_states_in_float32():
    torch.manual_seed(0)
    sequences = jagged([3, 0, 2], 4)
    embeddings = Embeddings(
        (Block(("user", "item"), torch.randn(3, 2, 4)),), {"seen": sequences, "tags": sequences}
    )
    model = create("dien", SCHEMA, PAIRS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        interests, final = model.units[0](sequences, embeddings["item"])
    assert interests.dtype == final.dtype == torch.float32
