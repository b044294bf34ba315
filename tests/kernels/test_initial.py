"""Initial values: against the plain twin, alone and in distribution."""

import numpy as np
import pytest

from girih import optim
from girih.kernels.cpu.initial import fill_initial
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import GroupSpec, Segment, TableSpec
from girih.store.rows.record import row_layout
from girih.tables import Constant, Normal, Uniform, Zeros
from support.twins import initial_value

RULES = [
    Normal(),
    Normal(mean=2, std=3),
    Uniform(low=-1, high=5),
    Zeros(),
    Constant(value=0.3),
    Uniform(low=2, high=2),
]


def spec_of(rules, dim=5, seed=0, names=("a", "b")):
    segments = [Segment(f"s{number}", dim, optim.SGD()) for number in range(len(rules))]
    return GroupSpec("g", tuple(TableSpec(name, tuple(rules)) for name in names), tuple(segments), seed=seed)


def initial(spec, table, key_id, num_shards=1):
    out = np.full(spec.dim, np.nan, np.float32)
    fill_initial(row_layout(spec, 0, num_shards).kernel, np.int64(key_id), table, out)
    return out


@pytest.mark.parametrize("key_id", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_each_initializer_is_its_plain_twin(key_id):
    spec = spec_of(RULES)
    for table in (0, 1):
        np.testing.assert_allclose(
            initial(spec, table, key_id), initial_value(spec, table, key_id), rtol=1e-6
        )


def test_values_depend_on_seed_table_name_segment_id_and_column_alone():
    spec = spec_of([Normal(), Normal()])
    value = initial(spec, 0, 7)
    assert len(set(value.tolist())) == 10
    for other in (
        initial(spec_of([Normal(), Normal()], seed=1), 0, 7),
        initial(spec, 1, 7),
        initial(spec, 0, 8),
    ):
        assert not set(value.tolist()) & set(other.tolist())
    turned = spec_of([Normal(), Normal()], names=("b", "a"))
    np.testing.assert_array_equal(value, initial(turned, 1, 7, num_shards=4))
    np.testing.assert_array_equal(value[:3], initial(spec_of([Normal(), Normal()], dim=3), 0, 7)[:3])


@pytest.mark.parametrize(
    ("rule", "mean", "std"), [(Normal(mean=1, std=2), 1, 2), (Uniform(low=-3, high=1), -1, 4 / 12**0.5)]
)
def test_values_have_the_distribution_they_should(rule, mean, std):
    spec = spec_of([rule], dim=8)
    kernel = row_layout(spec, 0, 1).kernel
    values = np.empty((200 if JIT_DISABLED else 20_000, 8), np.float32)
    for key_id in range(len(values)):
        fill_initial(kernel, np.int64(key_id), 0, values[key_id])
    bound = 5 / values.size**0.5
    assert abs(values.mean() - mean) < bound * std
    assert abs(values.std() - std) < bound * std
    assert abs(np.corrcoef(values.T) - np.eye(8)).max() < 5.5 / len(values) ** 0.5
    quantiles = np.quantile(values, [0.025, 0.975])
    expected = (
        (-0.9 * 2 + mean, 0.9 * 2 + mean)
        if rule.name == "uniform"
        else (mean - 1.96 * std, mean + 1.96 * std)
    )
    np.testing.assert_allclose(
        quantiles,
        [
            expected[0] - (0.1 if rule.name == "uniform" else 0),
            expected[1] + (0.1 if rule.name == "uniform" else 0),
        ],
        atol=30 * bound,
    )
    if rule.name == "uniform":
        assert values.min() >= rule.low
        assert values.max() <= rule.high
