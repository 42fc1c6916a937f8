"""The loss and its gradient: finite differences, the two ends, one program for all layers, and rows that agree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.duo import distillation as module
from kvjax.duo.distillation import distillation
from kvjax.duo.mixed_attention import Streaming

STREAMING = Streaming(2, 5)


def prompts(model, length=40, rows=2):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.spec.vocab_size, (rows, length))
    labels = rng.random((rows, length)) < 0.3
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(labels)


def hidden_states(model, tokens, alphas, streaming=STREAMING):
    """The mixed model through its own `__call__`, with matrices of scores."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    band = (distance <= streaming.recent) | (np.arange(length)[None] < streaming.sinks)
    masks = [jnp.asarray(mask & (distance >= 0))[None, None] for mask in (np.ones_like(band), band)]

    def attend(layer, query, key, value):
        query, key = (model.spec.rope.rotate(x, positions) for x in (query, key))
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / query.shape[3] ** 0.5
        alpha = jnp.repeat(alphas[layer], query.shape[2] // alphas.shape[1]).astype(query.dtype)
        alpha = alpha[None, None, :, None]
        full, near = (
            jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1), value)
            for mask in masks
        )
        return alpha * full + (1 - alpha) * near

    return model(tokens, attend)


def expected_loss(model, alphas, tokens, labels):
    apart = hidden_states(model, tokens, alphas) - hidden_states(model, tokens, jnp.ones_like(alphas))
    squared = np.asarray(apart**2).mean(-1)
    return np.mean([row[marked].mean() for row, marked in zip(squared, np.asarray(labels), strict=True)])


def test_loss_and_gradient_match_finite_differences_in_float64(make_plain):
    with jax.enable_x64(True):
        model = make_plain("float64")
        tokens, labels = prompts(model)
        alphas = np.random.default_rng(1).uniform(size=(3, 2))
        loss, gradient = distillation(model, jnp.asarray(alphas), tokens, labels, STREAMING)
        np.testing.assert_allclose(loss, expected_loss(model, jnp.asarray(alphas), tokens, labels), rtol=1e-6)
        for place in np.ndindex(alphas.shape):
            moved = np.zeros_like(alphas)
            moved[place] = 1e-5
            up, down = (expected_loss(model, jnp.asarray(alphas + way * moved), tokens, labels) for way in (1, -1))
            np.testing.assert_allclose(gradient[place], (up - down) / 2e-5, rtol=1e-5, atol=1e-6)


def test_a_llama_mixed_at_1_is_itself_and_at_0_streams(tiny):
    tokens, labels = prompts(tiny, length=64, rows=1)
    loss, gradient = distillation(tiny, jnp.ones((4, 2)), tokens, labels, STREAMING)
    # The loss has its minimum there.
    assert loss < 1e-8
    assert np.abs(gradient).max() < 1e-4
    loss, _ = distillation(tiny, jnp.zeros((4, 2)), tokens, labels, STREAMING)
    np.testing.assert_allclose(loss, expected_loss(tiny, jnp.zeros((4, 2)), tokens, labels), rtol=1e-4)


def test_all_layers_share_one_program_in_each_direction(tiny):
    functions: list[Any] = [module._full_layer, module._mixed_layer, module._mixed_layer_backward]
    tokens, labels = prompts(tiny, length=33, rows=1)
    before = [function._cache_size() for function in functions]
    distillation(tiny, jnp.full((4, 2), 0.5), tokens, labels, STREAMING)
    # `_mixed_layer` is called within the backward program too, which adds no program of its own.
    assert [function._cache_size() - size for function, size in zip(functions, before, strict=True)] == [1, 1, 1]


def test_rows_of_a_batch_count_alike_however_many_labels_they_have(make_plain):
    model = make_plain("float32")
    tokens, labels = prompts(model)
    labels = labels.at[0].set(jnp.arange(40) == 7)
    alphas = jnp.full((3, 2), 0.5)
    together = distillation(model, alphas, tokens, labels, STREAMING)
    alone = [distillation(model, alphas, tokens[row, None], labels[row, None], STREAMING) for row in range(2)]
    for both, first, second in zip(together, *alone, strict=True):
        np.testing.assert_allclose(both, (first + second) / 2, rtol=1e-4, atol=1e-7)


def test_a_layer_is_computed_again_instead_of_kept(tiny):
    # Temporary memory of the backward program does not hold T x T: for 4,096 tokens of one head 67 MB.
    x = jax.ShapeDtypeStruct((1, 4096, tiny.config.hidden_size), jnp.float32)
    alpha = jax.ShapeDtypeStruct((2,), jnp.float32)
    lowered = module._mixed_layer_backward.lower(tiny.layers[0], x, alpha, x, tiny.spec.rope, Streaming(64, 128))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4096 * 4096 * 4


@pytest.mark.parametrize("lacking", ["layers", "embed", "norm"])
def test_a_model_that_cannot_be_run_by_layers_is_not_layered(make_plain, lacking):
    model = make_plain("float32")
    whole = {name: getattr(model, name) for name in ("spec", "logits", "layers", "embed", "norm")}
    del whole[lacking]
    other = type("Other", (), {**whole, "__call__": lambda self, tokens, attend: tokens})()
    assert isinstance(model, module.LayeredModel)
    assert not isinstance(other, module.LayeredModel)
