"""What the surrogate learns: damages that add up, layers that go together, and how sure it is."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from archsearch.headmap import HeadMap
from archsearch.search.proposals.features import BLOCKS, Features
from archsearch.search.proposals.surrogate import Bend, Settings, Surrogate, choose_settings
from archsearch.search.proposals.units import Row, Units
from archsearch.search.space import random_map
from tests.search.proposals.damage import SHAPE, Damage

DAMAGE = Damage(3)
UNITS = Units(SHAPE, whole_groups=False)


def some_maps(count: int, seed: int) -> list[HeadMap]:
    return [random_map(SHAPE, Random(f"{seed}/{n}"), 1, 60) for n in range(count)]


def learn(features: Features, count: int, draws: int = 64) -> tuple[Row, Row, Row]:
    """Damages of 200 maps that were not learnt from, and what is said of them: mean and deviation."""
    maps = some_maps(count, 0)
    known, values = features.of(UNITS.of_maps(maps)), np.array([DAMAGE.kl(m) for m in maps])
    settings = choose_settings(known, values, features.block_F)
    rng = np.random.default_rng(0)
    model = Surrogate.fit(known, values, features.block_F, settings, draws, rng)
    others = some_maps(200, 1)
    said = model.draws(features.of(UNITS.of_maps(others)))
    return np.array([DAMAGE.kl(m) for m in others]), said.mean(axis=1), said.std(axis=1)


def features_with(*tables: Row) -> Features:
    return Features(UNITS, tables)


def correlation(a: Row, b: Row) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_more_maps_tell_more_and_scores_help_where_there_are_few() -> None:
    table = UNITS.of_table(DAMAGE.scores["replacement_kl"].heads)
    few_blind = correlation(*learn(features_with(), 25)[:2])
    few = correlation(*learn(features_with(table), 25)[:2])
    many = correlation(*learn(features_with(table), 200)[:2])
    assert few_blind + 0.02 < few < many
    assert few > 0.9
    assert many > 0.98


def test_deviations_are_of_the_size_of_the_errors() -> None:
    true, mean, deviation = learn(features_with(), 60)
    assert 0.5 < np.std((true - mean) / deviation) < 2.5


def test_layers_that_go_together_are_learnt() -> None:
    """The square of a layer's share is not what single heads explain."""
    features = features_with()
    rng = np.random.default_rng(2)
    shares = (rng.random((300, UNITS.count)) < 0.5).astype(np.float64)
    gone_L = 1 - shares @ UNITS.layer_UL / UNITS.units_of_layer
    values = gone_L**2 @ rng.random(SHAPE.num_layers)
    settings = choose_settings(features.of(shares[:200]), values[:200], features.block_F)
    errors = []
    for scales in (settings.scales, (*settings.scales[:2], 1e-6)):
        chosen = Settings(settings.bend, scales, settings.noise)
        known = features.of(shares[:200])
        model = Surrogate.fit(known, values[:200], features.block_F, chosen, 32, rng)
        errors.append(np.abs(model.draws(features.of(shares[200:])).mean(axis=1) - values[200:]))
    assert errors[0].mean() < 0.8 * errors[1].mean()


def test_draws_spread_as_the_posterior_does() -> None:
    """Against the closed form of Bayesian regression."""
    rng = np.random.default_rng(0)
    features, values = rng.standard_normal((20, 6)), rng.standard_normal(20)
    block_F = np.array([0, 0, 1, 1, 2, 2])
    settings = Settings(0.0, (1.0, 0.5, 2.0), 0.3)
    model = Surrogate.fit(features, values, block_F, settings, 20_000, rng)
    prior = np.array(settings.scales)[block_F] ** 2
    centred = features - features.mean(axis=0)
    cov = np.linalg.inv(centred.T @ centred / 0.3 + np.diag(1 / prior))
    y = (values - values.mean()) / values.std()
    assert model.weights_FS.mean(axis=1) == pytest.approx(cov @ centred.T @ y / 0.3, abs=0.02)
    assert np.cov(model.weights_FS) == pytest.approx(cov, abs=0.02)


@pytest.mark.parametrize("bend", [0.0, 4.0, 40.0])
def test_bends_are_undone(bend: float) -> None:
    values = np.random.default_rng(1).random(30) * 3 - 1
    bent = Bend.of(values, bend)
    assert bent.undo(bent.apply(values)) == pytest.approx(values)
    step = 1e-6 * (values.max() - values.min())
    slopes = (bent.apply(values + step) - bent.apply(values)) / 1e-6
    assert bent.log_slope(values) == pytest.approx(np.log(slopes).sum(), abs=1e-2)


def test_effects_are_what_replacing_a_unit_does() -> None:
    features = features_with(UNITS.of_table(DAMAGE.scores["causal"].heads))
    rng = np.random.default_rng(4)
    weights_F1 = rng.standard_normal((len(features.block_F), 1))
    weights_F1[features.block_F == BLOCKS.index("layers")] = 0
    weights_F1[features.size_feature] = 0
    base = (rng.random((1, UNITS.count)) < 0.5).astype(np.float64)
    without = np.repeat(base, UNITS.count, axis=0)
    np.fill_diagonal(without, 0.0)
    with_ = without.copy()
    np.fill_diagonal(with_, 1.0)
    change = (features.of(without) - features.of(with_)) @ weights_F1
    assert features.effects(weights_F1)[0] == pytest.approx(change[:, 0])
