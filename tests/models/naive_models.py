"""The models once more, straight from their papers: loops over examples, in numpy and float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from girih.models.embeddings import Block, Embeddings, Jagged
from girih.schema import Schema

SCENES = 3
"""Domains of STAR; the numeric feature ``scene`` holds their numbers."""


@dataclass
class Example:
    """One example as the papers see it: vectors and weights by feature name."""

    numeric: np.ndarray
    vectors: dict[str, np.ndarray]
    weights: dict[str, float]
    histories: dict[str, list[np.ndarray]]


@dataclass
class Inputs:
    """A random batch, as the model gets it and as the naive twin does."""

    numeric: torch.Tensor
    embeddings: Embeddings
    examples: list[Example]

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        found = {"/".join(block.features): block.values for block in self.embeddings.blocks}
        found |= {f"first order {b.features}": b.values for b in self.embeddings.first_order}
        return found | {f"history {k}": v.values for k, v in self.embeddings.sequences.items()}


def make_inputs(
    schema: Schema, needs, num_examples=5, packing="one", lengths=None, relations=None, seed=0
) -> Inputs:
    """Random inputs; ``packing`` is "one" block a width, or "split" into several in another order.

    ``relations`` maps neighbours to whose they are: there are two for each id of a sequence.
    """
    random = np.random.default_rng(seed)
    numeric = random.normal(size=(num_examples, len(schema.numeric)))
    for place, feature in enumerate(schema.numeric):
        if feature.name == "scene":
            numeric[:, place] = np.random.default_rng(seed).integers(0, SCENES, num_examples)
    dims = {f.name: schema.dim_of(f) for f in schema.sparse}
    pooled = [name for name in dims if "embedding" in needs.get(name, ())]
    vectors = {name: random.normal(size=(num_examples, dims[name])) for name in pooled}
    first = [name for name in dims if "first_order" in needs.get(name, ())]
    weights = {name: random.normal(size=num_examples) for name in first}
    blocks = tuple(_block(names, [vectors[n] for n in names]) for names in _packed(pooled, dims, packing))
    ones = dict.fromkeys(first, 1)
    first_order = tuple(_block(p, [weights[n][:, None] for n in p]) for p in _packed(first, ones, packing))
    sequences, histories = {}, {}
    for name in [n for n in dims if "sequence" in needs.get(n, ())]:
        sizes = random.integers(0, 4, size=num_examples) if lengths is None else np.array(lengths, np.int64)
        root = (relations or {}).get(name)
        if root in sequences:
            sizes = 2 * np.diff(sequences[root].offsets.numpy())
        values = random.normal(size=(sizes.sum(), dims[name]))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        sequences[name] = Jagged(torch.tensor(values, requires_grad=True), torch.tensor(bounds))
        histories[name] = [list(values[a:b]) for a, b in pairwise(bounds)]
    examples = [
        Example(
            numeric[b],
            {name: vectors[name][b] for name in pooled},
            {name: weights[name][b] for name in first},
            {name: histories[name][b] for name in histories},
        )
        for b in range(num_examples)
    ]
    return Inputs(torch.tensor(numeric), Embeddings(blocks, sequences, first_order), examples)


def _packed(names, dims, packing):
    by_dim = {}
    for name in names:
        by_dim.setdefault(dims[name], []).append(name)
    if packing == "one":
        return list(by_dim.values())
    return [part for group in by_dim.values() for part in (group[1::2], group[0::2]) if part]


def _block(names, columns):
    return Block(tuple(names), torch.tensor(np.stack(columns, axis=1), requires_grad=True))


def run(naive, model, inputs: Inputs, **options) -> np.ndarray:
    """Logits [B, T] of a naive twin with the model's own parameters."""
    parameters = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    return np.array([np.atleast_1d(naive(parameters, example, **options)) for example in inputs.examples])


def mlp(p, prefix, x, *, last_is_plain=True):
    names = [key.removeprefix(f"{prefix}.").split(".") for key in p if key.startswith(f"{prefix}.")]
    numbers = sorted(int(name[0]) for name in names if len(name) == 2 and name[1] == "weight")
    for number in numbers:
        weight, bias = p[f"{prefix}.{number}.weight"], p[f"{prefix}.{number}.bias"]
        x = np.array([bias[o] + sum(weight[o, i] * x[i] for i in range(len(x))) for o in range(len(bias))])
        if number != numbers[-1] or not last_is_plain:
            x = np.maximum(x, 0)
    return x


def flat(e: Example, dims) -> np.ndarray:
    return np.concatenate([*(e.vectors[name] for name in dims if name in e.vectors), e.numeric])


def first_order(p, prefix, e):
    total = sum(e.weights.values())
    for x, value in enumerate(e.numeric):
        total += p[f"{prefix}.weight"][x] * value
    return total


def fields(p, prefix, e, dims):
    found = [e.vectors[name] for name in dims]
    return found + [p[f"{prefix}.vectors"][x] * value for x, value in enumerate(e.numeric)]


def second_order(p, e, dims):
    v = fields(p, "second_order", e, dims)
    return sum(float(v[i] @ v[j]) for i in range(len(v)) for j in range(i + 1, len(v)))


def lr(p, e, dims):
    return p["first_order.bias"] + first_order(p, "first_order", e)


def fm(p, e, dims):
    return p["first_order.bias"] + first_order(p, "first_order", e) + second_order(p, e, dims)


def dnn(p, e, dims):
    return mlp(p, "deep", flat(e, dims))


def wide_deep(p, e, dims):
    return first_order(p, "wide", e) + mlp(p, "deep", flat(e, dims))


def deepfm(p, e, dims):
    return first_order(p, "first_order", e) + second_order(p, e, dims) + mlp(p, "deep", flat(e, dims))


def dlrm(p, e, dims):
    v = [e.vectors[name] for name in dims]
    dense = [value for vector in v for value in vector]
    if len(e.numeric):
        dense = list(mlp(p, "bottom", e.numeric, last_is_plain=False))
        v = [np.array(dense), *v]
    dots = [float(v[i] @ v[j]) for i in range(len(v)) for j in range(i)]
    return mlp(p, "top", np.array(dense + dots))


def _linear(p, prefix, x):
    return p[f"{prefix}.weight"] @ x + p[f"{prefix}.bias"]


def dcn(p, e, dims):
    x0 = x = flat(e, dims)
    for weight, bias in zip(p["cross.weights"], p["cross.biases"], strict=True):
        product = sum(x[i] * weight[i] for i in range(len(x)))
        x = x0 * product + bias + x
    logits = p["cross.outputs"] @ x + p["bias"]
    if "deep.0.weight" in p:
        logits = logits + p["final.weight"] @ mlp(p, "deep", x0, last_is_plain=False)
    return logits


def dcnv2(p, e, dims, structure="parallel"):
    x0 = x = flat(e, dims)
    layer = 0
    while f"cross.{layer}.linear.weight" in p:
        weight = p[f"cross.{layer}.linear.weight"]
        if f"cross.{layer}.narrow.weight" in p:
            weight = weight @ p[f"cross.{layer}.narrow.weight"]
        x = x0 * (weight @ x + p[f"cross.{layer}.linear.bias"]) + x
        layer += 1
    if "deep.0.weight" not in p:
        return _linear(p, "final", x)
    if structure == "stacked":
        return _linear(p, "final", mlp(p, "deep", x, last_is_plain=False))
    return _linear(p, "final", np.concatenate([x, mlp(p, "deep", x0, last_is_plain=False)]))


def din(p, e, dims, pairs, softmax=False):
    interests = []
    for number, (history, target) in enumerate(pairs):
        t, total = e.vectors[target], np.zeros(dims[history])
        scores = [
            mlp(p, f"deep.0.attention.{number}.unit", np.concatenate([t, v, t - v, t * v]))[0]
            for v in e.histories[history]
        ]
        if softmax:
            scores = [math.exp(s) / sum(math.exp(o) for o in scores) for s in scores]
        for score, v in zip(scores, e.histories[history], strict=True):
            total = total + score * v
        interests.append(total)
    return mlp(p, "deep", np.concatenate([flat(e, dims), *interests]))


def mmoe(p, e, dims, num_experts, num_labels):
    x = flat(e, dims)
    of_experts = p["first.weight"][: len(p["first.bias"])]
    gates = p["first.weight"][len(of_experts) :].reshape(num_labels, num_experts, -1)
    first = (of_experts @ x + p["first.bias"]).reshape(num_experts, -1)
    experts = [
        np.maximum(_member(p, "experts", number, np.maximum(h, 0)), 0) for number, h in enumerate(first)
    ]
    logits = []
    for label in range(num_labels):
        gate = np.exp(gates[label] @ x)
        mixed = sum(g * expert for g, expert in zip(gate / gate.sum(), experts, strict=True))
        logits.append(_member(p, "towers", label, mixed)[0])
    return np.array(logits)


def esmm(p, e, dims):
    ctr, cvr = (1 / (1 + np.exp(-mlp(p, part, flat(e, dims))[0])) for part in ("click", "after"))
    return np.array([math.log(ctr / (1 - ctr)), math.log(ctr * cvr / (1 - ctr * cvr))])


def _member(p, prefix, number, h):
    """One of several MLPs whose layers are stacked; its last layer is plain."""
    layer = 0
    while f"{prefix}.weights.{layer}" in p:
        weight = p[f"{prefix}.weights.{layer}"][number]
        h = np.maximum(h, 0) if layer else h
        h = weight @ h + p[f"{prefix}.biases.{layer}"].reshape(-1, len(weight))[number]
        layer += 1
    return h


def xdeepfm(p, e, dims, split_half=False):
    x0 = x = fields(p, "fields", e, dims)
    sums, layer = [], 0
    while f"cin.maps.{layer}.weight" in p:
        maps = []
        for weights in p[f"cin.maps.{layer}.weight"]:
            pairs = [(before, first) for before in x for first in x0]
            maps.append(sum(w * before * first for w, (before, first) in zip(weights, pairs, strict=True)))
        layer += 1
        half = len(maps) // 2 if split_half and f"cin.maps.{layer}.weight" in p else 0
        sums += [values.sum() for values in maps[half:]]
        x = maps[:half] if half else maps
    crossed = p["cin_output.weight"] @ np.array(sums)
    return first_order(p, "first_order", e) + crossed + mlp(p, "deep", flat(e, dims))


def can(p, e, dims, co_action, layers, orders, independent_orders=False):
    in_units = {name for item, feeds in co_action.items() for name in (item, *feeds)}
    units = []
    for item, feeds in co_action.items():
        for feed in feeds:
            total = np.zeros(orders * sum(layers))
            for vector in e.histories[feed] if feed in e.histories else [e.vectors[feed]]:
                total += _co_action(e.vectors[item], vector, layers, orders, independent_orders)
            units.append(total)
    others = [e.vectors[name] for name in dims if name not in in_units]
    return mlp(p, "deep", np.concatenate([*others, e.numeric, *units]))


def _co_action(row, vector, layers, orders, independent_orders):
    found = []
    for order in range(orders):
        start = order * len(row) // orders if independent_orders else 0
        parameters = iter(row[start:])
        h = [value ** (order + 1) for value in vector]
        for number, width in enumerate(layers):
            weight = [[next(parameters) for _ in range(width)] for _ in h]
            bias = [next(parameters) for _ in range(width)]
            h = [bias[o] + sum(h[i] * weight[i][o] for i in range(len(h))) for o in range(width)]
            if number < len(layers) - 1:
                h = [math.tanh(value) for value in h]
            found += h
    return np.array(found)


def _input_of_star(e, dims, place):
    return np.concatenate([*(e.vectors[name] for name in dims), np.delete(e.numeric, place)])


def moments(examples, dims, place):
    """Mean and variance of each column over a batch's examples of each domain that has several."""
    by_domain = {}
    for e in examples:
        by_domain.setdefault(int(e.numeric[place]), []).append(_input_of_star(e, dims, place))
    found = {}
    for domain, inputs in by_domain.items():
        if len(inputs) > 1:
            mean = sum(inputs) / len(inputs)
            found[domain] = mean, sum((x - mean) ** 2 for x in inputs) / len(inputs)
    return found


def star(p, e, dims, place, moments):
    """``moments`` are those of the batch, by domain; the running ones serve where there are none."""
    domain = int(e.numeric[place])
    z = x = _input_of_star(e, dims, place)
    if "norm.scale" in p:
        running = p["norm.running_mean"][domain], p["norm.running_var"][domain]
        mean, variance = moments.get(domain, running)
        scale = p["norm.scale"] * p["norm.domain_scale"][domain]
        z = scale * (x - mean) / np.sqrt(variance + 1e-5) + p["norm.shift"] + p["norm.domain_shift"][domain]
    layer = 0
    while f"star.{layer}.weight" in p:
        weight = p[f"star.{layer}.shared.weight"] * p[f"star.{layer}.weight"][domain]
        bias = p[f"star.{layer}.shared.bias"] + p[f"star.{layer}.bias"][domain]
        z = weight @ (np.maximum(z, 0) if layer else z) + bias
        layer += 1
    return z + mlp(p, "auxiliary", np.concatenate([p["indicator.weight"][domain], x]))


def two_tower(p, e, dims, user, item, numeric, cosine=False, temperature=1.0):
    """``numeric`` names the numeric features, in order."""
    u, v = retrieval(p, e, dims, user, item, numeric).reshape(2, -1)
    length = np.sqrt(u @ u) * np.sqrt(v @ v) if cosine else 1.0
    return float(u @ v) / (length * temperature)


def retrieval(p, e, dims, user, item, numeric):
    """Both towers, side by side."""
    values = dict(zip(numeric, e.numeric, strict=True))
    towers = []
    for prefix, names in (("user", user), ("item", item)):
        vectors = [e.vectors[name] for name in dims if name in names]
        towers.append(mlp(p, prefix, np.concatenate([*vectors, [values[n] for n in numeric if n in names]])))
    return np.concatenate(towers)


# Models of sequences, in torch: the same loops, through which autograd finds the gradients of parameters and inputs.


class Twin(torch.nn.Module):
    """The naive form of a model of sequences over that model's own parameters, example by example."""

    def __init__(self, name, model):
        super().__init__()
        self.name, self.model, self.needs = name, model, model.needs
        self.auxiliary = 0.0

    def forward(self, numeric, embeddings):
        p = dict(self.model.named_parameters())
        examples = torch_examples(numeric, embeddings)
        if self.name == "dien" and self.training:
            self.auxiliary = self.model.auxiliary * dien_auxiliary(p, examples, self.model.pairs)
        order = [feature.name for feature in self.model.schema.sparse]
        return torch.stack([SEQUENCE_MODELS[self.name](p, e, order, self.model) for e in examples])

    def loss(self, outputs, batch):
        each = torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch.labels, reduction="none")
        return each.mean() + self.auxiliary


def torch_examples(numeric, embeddings: Embeddings) -> list[Example]:
    vectors = {
        name: block.values[:, i] for block in embeddings.blocks for i, name in enumerate(block.features)
    }
    histories = {
        name: [list(sequence.values[a:b]) for a, b in pairwise(sequence.offsets.tolist())]
        for name, sequence in embeddings.sequences.items()
    }
    return [
        Example(
            numeric[b],
            {name: values[b] for name, values in vectors.items()},
            {},
            {name: lists[b] for name, lists in histories.items()},
        )
        for b in range(len(numeric))
    ]


def torch_mlp(p, prefix, x):
    own = [key.removeprefix(f"{prefix}.").split(".") for key in p if key.startswith(f"{prefix}.")]
    numbers = sorted(int(number) for number, kind in own if kind == "weight")
    for number in numbers:
        x = p[f"{prefix}.{number}.weight"] @ x + p[f"{prefix}.{number}.bias"]
        if number != numbers[-1]:
            x = torch.relu(x)
    return x


def torch_flat(e, order):
    return torch.cat([*(e.vectors[name] for name in order if name in e.vectors), e.numeric])


def gru_cell(p, prefix, x, h, attention=None):
    w, b, u = p[f"{prefix}.inputs.weight"], p[f"{prefix}.inputs.bias"], p[f"{prefix}.states.weight"]
    n = len(h)
    update = torch.sigmoid(w[:n] @ x + u[:n] @ h + b[:n])
    reset = torch.sigmoid(w[n : 2 * n] @ x + u[n : 2 * n] @ h + b[n : 2 * n])
    new = torch.tanh(w[2 * n :] @ x + reset * (u[2 * n :] @ h) + b[2 * n :])
    if attention is not None:
        update = attention * update
    return (1 - update) * h + update * new


def lstm_cell(p, prefix, x, h, c):
    w, b, u = p[f"{prefix}.inputs.weight"], p[f"{prefix}.inputs.bias"], p[f"{prefix}.states.weight"]
    n = len(h)
    i, f, o, g = (
        w[k * n : (k + 1) * n] @ x + u[k * n : (k + 1) * n] @ h + b[k * n : (k + 1) * n] for k in range(4)
    )
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def softmax_of(scores):
    exponentials = [torch.exp(score) for score in scores]
    return [each / sum(exponentials) for each in exponentials]


def sum_of(weights, vectors, zero):
    return sum((w * v for w, v in zip(weights, vectors, strict=True)), zero)


def dien_interests(p, prefix, behaviours, zero):
    h, interests = zero, []
    for behaviour in behaviours:
        h = gru_cell(p, f"{prefix}.extractor", behaviour, h)
        interests.append(h)
    return interests


def dien(p, e, order, model):
    evolved = []
    for number, (history, target) in enumerate(model.pairs):
        t, zero = e.vectors[target], torch.zeros_like(e.vectors[target])
        interests = dien_interests(p, f"units.{number}", e.histories[history], zero)
        w = p[f"units.{number}.attention.linear.weight"]
        h = zero
        for interest, attention in zip(interests, softmax_of([i @ (w @ t) for i in interests]), strict=True):
            h = gru_cell(p, f"units.{number}.evolution", interest, h, attention)
        evolved.append(h)
    return torch_mlp(p, "deep", torch.cat([torch_flat(e, order), *evolved]))


def dien_auxiliary(p, examples, pairs):
    total = torch.zeros(())
    for number, (history, _) in enumerate(pairs):
        for b, e in enumerate(examples):
            behaviours = e.histories[history]
            zero = torch.zeros_like(p[f"units.{number}.extractor.states.weight"][0])
            interests, losses = dien_interests(p, f"units.{number}", behaviours, zero), []
            for t in range(len(behaviours) - 1):
                others = [o.histories[history] for o in [*examples[b + 1 :], *examples[:b]]]
                negatives = [other[t + 1] for other in others if len(other) > t + 1]
                if negatives:
                    clicked = torch.sigmoid(interests[t] @ behaviours[t + 1])
                    not_clicked = torch.sigmoid(interests[t] @ negatives[0])
                    losses.append(-torch.log(clicked) - torch.log(1 - not_clicked))
            if losses:
                total = total + sum(losses) / len(losses)
    return total / len(examples)


def layer_norm(p, prefix, x):
    deviation = ((x - x.mean()) ** 2).mean()
    return (x - x.mean()) / torch.sqrt(deviation + 1e-5) * p[f"{prefix}.weight"] + p[f"{prefix}.bias"]


def self_attention(p, prefix, xs, heads):
    names = ("queries", "keys", "values", "output")
    q, k, v, output = (p[f"{prefix}.{name}.weight"] for name in names)
    dim, result = len(xs[0]), []
    for x in xs:
        found = []
        for head in range(heads):
            part = slice(head * dim // heads, (head + 1) * dim // heads)
            weights = softmax_of([(q @ x)[part] @ (k @ other)[part] / math.sqrt(dim) for other in xs])
            found.append(sum(w * (v @ other)[part] for w, other in zip(weights, xs, strict=True)))
        y = layer_norm(p, f"{prefix}.attended", x + output @ torch.cat(found))
        result.append(layer_norm(p, f"{prefix}.fed", y + torch_mlp(p, f"{prefix}.feed_forward", y)))
    return result


def dsin(p, e, order, model):
    activated = []
    for number, (history, target) in enumerate(model.pairs):
        unit, prefix = model.units[number], f"units.{number}"
        t, rest, cut = e.vectors[target], list(e.histories[history]), []
        while rest and len(cut) < unit.most:  # the newest session first
            rest, session = rest[: -unit.length], rest[-unit.length :]
            cut.append(session)
        interests = []
        for age, session in reversed(list(enumerate(cut))):
            biased = [
                v
                + p[f"{prefix}.session_bias"][age]
                + p[f"{prefix}.place_bias"][place]
                + p[f"{prefix}.column_bias"]
                for place, v in enumerate(session)
            ]
            found = self_attention(p, f"{prefix}.extractor", biased, unit.extractor.heads)
            interests.append(sum(found) / len(found))
        directions = []
        for name, inputs in (("forwards", interests), ("backwards", interests[::-1])):
            h, c, states = torch.zeros_like(t), torch.zeros_like(t), []
            for interest in inputs:
                h, c = lstm_cell(p, f"{prefix}.interaction.{name}", interest, h, c)
                states.append(h)
            directions.append(states)
        states = [torch.cat(both) for both in zip(directions[0], directions[1][::-1], strict=True)]
        for name, vectors, zero in (("of_interests", interests, t), ("of_states", states, torch.cat([t, t]))):
            w = p[f"{prefix}.{name}.linear.weight"]
            weights = softmax_of([v @ (w @ t) for v in vectors])
            activated.append(sum_of(weights, vectors, torch.zeros_like(zero)))
    return torch_mlp(p, "deep", torch.cat([torch_flat(e, order), *activated]))


def atbrg(p, e, order, model):
    def nodes_of(feature):
        return e.histories[feature] if feature in e.histories else [e.vectors[feature]]

    def extracted(feature, level=0):
        nodes = nodes_of(feature)
        own = [(r, name) for r, (name, heads) in enumerate(model.relations.items()) if heads == feature]
        if not own:
            return nodes
        prefix, result = f"extractors.{level}", []
        neighbours = [(r, extracted(name, level + 1)) for r, name in own]
        for number, x in enumerate(nodes):
            scores, messages = [], []
            for r, tails in neighbours:
                each = len(tails) // len(nodes)
                for tail in tails[number * each : (number + 1) * each]:
                    pair = torch.cat([x, tail])
                    query = p[f"{prefix}.queries.weight"] @ p["relation_vectors"][r]
                    scores.append(query @ (p[f"{prefix}.keys.weight"] @ pair) / math.sqrt(len(x)))
                    messages.append(p[f"{prefix}.values.weight"] @ pair)
            taken = sum_of(softmax_of(scores), messages, torch.zeros_like(x))
            merged = p[f"{prefix}.merge.weight"] @ torch.cat([x, taken]) + p[f"{prefix}.merge.bias"]
            result.append(torch.relu(merged))
        return result

    targets = {target: extracted(target)[0] for _, target in model.pairs}
    activated = []
    for number, (history, target) in enumerate(model.pairs):
        t, vectors = targets[target], extracted(history)
        scores = [torch_mlp(p, f"units.{number}.unit", torch.cat([t, v, t - v, t * v]))[0] for v in vectors]
        if model.units[number].softmax:
            scores = softmax_of(scores)
        activated.append(sum_of(scores, vectors, torch.zeros_like(t)))
    return torch_mlp(p, "deep", torch.cat([torch_flat(e, order), *targets.values(), *activated]))


SEQUENCE_MODELS = {"dien": dien, "dsin": dsin, "atbrg": atbrg}
