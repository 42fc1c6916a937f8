"""The pattern that comes with kvjax, what DuoAttention makes of it, and its picture."""

import dataclasses
import importlib.resources
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pattern_plots import head_pattern_map
from kvjax.rope import Rope
from kvjax.shipped_patterns import model_sizes, shipped_pattern

NAME = "SmolLM2-135M-Instruct"


@pytest.mark.smollm2
def test_the_embedded_model_has_a_pattern_that_was_learned_on_long_prompts(smollm2):
    pattern = shipped_pattern(smollm2.params.spec)
    scores = np.asarray(pattern.scores)
    assert scores.shape == (30, 3)
    assert 0.0 <= scores.min() < 0.05
    assert 0.95 < scores.max() <= 1.0
    about = json.loads((importlib.resources.files("kvjax.shipped_patterns") / NAME / "training.json").read_text())
    assert about["model"] == model_sizes(smollm2.params.spec)
    assert about["recipe"]["max_length"] >= 1500
    assert (pattern.sinks, pattern.recent) == (about["recipe"]["sinks"], about["recipe"]["recent"])
    assert about["seconds"] > 0


@pytest.mark.parametrize("prefill_mask", ["dense", "streaming"])
def test_duo_attention_without_a_pattern_is_duo_attention_with_the_shipped_one(prefill_mask):
    about = json.loads((importlib.resources.files("kvjax.shipped_patterns") / NAME / "training.json").read_text())
    sizes = {**about["model"], "rope": Rope(head_dim=64, theta=100000.0)}
    model = kvjax.ModelSpec(**sizes, dtype="float32")
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 40, n, 64)), jnp.float32) for n in (9, 3, 3))
    positions = jnp.arange(40, dtype=jnp.int32)[None]
    results = []
    for pattern in (None, shipped_pattern(model)):
        policy = kvjax.DuoAttention(pattern=pattern, sinks=2, recent=6, prefill_mask=prefill_mask)
        # Its last head streams, the others retrieve.
        spec = policy.layer_specs(model, 40, 2)[0]
        output, state = policy.prefill(spec, query, key, value, positions, model.rope)
        step, state = policy.decode(spec, state, query[:, 0], key[:, 0], value[:, 0], positions[:, 0] + 40, model.rope)
        results.append((output, step, state.kv, state.positions, state.lengths))
    for mine, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, wanted)
    assert np.asarray(results[0][-1]).tolist() == [[41, 41, 8]]


def test_another_model_is_told_how_to_get_a_pattern(tiny):
    with pytest.raises(ValueError, match=rf"comes with {NAME}'s only. Learn one with `kvjax duo identify MODEL"):
        kvjax.prefill(tiny, [1, 2, 3], policy=kvjax.DuoAttention(), max_new_tokens=1)


def test_a_model_with_other_positions_is_another_model(tiny):
    spec = tiny.spec
    assert model_sizes(spec) != model_sizes(dataclasses.replace(spec, max_positions=spec.max_positions + 1))
    assert model_sizes(spec) != model_sizes(
        dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, theta=spec.rope.theta + 1))
    )


def test_a_pattern_is_drawn_with_a_cell_for_every_head_and_all_heads_in_the_histogram():
    scores = np.linspace(0, 1, 12).reshape(4, 3)
    figure = head_pattern_map(kvjax.HeadPattern.of(scores), title="Heads")
    picture, histogram, *_ = figure.axes
    (image,) = picture.images
    np.testing.assert_allclose(np.asarray(image.get_array()), scores.T)
    assert picture.get_title() == "Heads"
    assert sum(patch.get_height() for patch in histogram.patches) == 12  # pyright: ignore[reportAttributeAccessIssue]
