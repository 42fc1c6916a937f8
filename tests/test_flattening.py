"""Models are flattened once, as long as they stay as they are."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax.steps
from kvjax import flattening
from kvjax_models import Llama


@pytest.fixture
def model(tiny) -> Llama:
    return nnx.clone(tiny)


def assert_is_flattened(model):
    leaves, structure = flattening.flatten(model)
    wanted, wanted_structure = jax.tree.flatten(model)
    assert len(leaves) == len(wanted)
    assert all(mine is theirs for mine, theirs in zip(leaves, wanted, strict=True))
    assert structure == wanted_structure


def test_a_model_is_walked_through_once(model, monkeypatch):
    first, structure = flattening.flatten(model)

    def fail(tree):
        raise AssertionError("walked through again")

    monkeypatch.setattr(jax.tree, "flatten", fail)
    again, same = flattening.flatten(model)
    assert same is structure
    assert all(mine is theirs for mine, theirs in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.norm.scale.set_value(jnp.ones(128)),
        lambda model: setattr(model.norm, "scale", nnx.Param(jnp.ones(128))),
        lambda model: setattr(model, "lm_head", None),
        lambda model: setattr(model.layers[1], "mark", 5),
        lambda model: model.layers.pop(),
        lambda model: setattr(model.layers[0], "q_proj", model.layers[1].q_proj),
        lambda model: setattr(model.norm, "extra", nnx.Param(jnp.ones(2))),
        lambda model: nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model))),
    ],
)
def test_a_model_that_was_changed_is_seen(model, change):
    for _ in range(2):
        assert_is_flattened(model)
    change(model)
    for _ in range(2):
        assert_is_flattened(model)


def test_shared_arrays_and_other_pytrees_are_flattened_as_ever(model):
    model.layers[0].input_norm.scale = nnx.Param(model.norm.scale.get_raw_value())
    assert_is_flattened(model)
    model.norm.scale.set_value(jnp.zeros(128))
    assert_is_flattened(model)
    assert_is_flattened({"weights": [jnp.ones(2), 2.0]})


def test_nothing_is_kept_of_a_model_that_is_gone(model):
    model.norm.scale.set_value(jnp.full(128, 2.0))
    first = weakref.ref(model.norm.scale.get_raw_value())
    flattening.flatten(model)
    model.norm.scale.set_value(jnp.zeros(128))
    gc.collect()
    assert first() is None
    key = id(model)
    other = nnx.clone(model)
    flattening.flatten(other)
    key, gone = id(other), weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert key not in flattening._walks


def test_decoding_by_hand_neither_flattens_the_model_nor_asks_for_free_slots(model, monkeypatch):
    _, cache = kvjax.prefill(model, [5, 6, 7], policy=kvjax.Full(), max_new_tokens=4)
    _, cache = kvjax.decode(model, cache, [5])
    room = int(kvjax.steps._free_slots(cache)[0])
    asked = []
    ask = kvjax.steps._free_slots
    monkeypatch.setattr(kvjax.steps, "_free_slots", lambda cache: asked.append(cache) or ask(cache))
    logits = jnp.zeros(0)
    with monkeypatch.context() as patch:
        patch.setattr(flattening._Walk, "through", lambda *args: pytest.fail("walked through again"))
        for _ in range(room):
            logits, cache = kvjax.decode(model, cache, [5])
    assert np.isfinite(logits).all()
    assert asked == []
    with pytest.raises(ValueError, match="the cache has no slot left for row 0"):
        kvjax.decode(model, cache, [5])
    assert len(asked) == 1
