"""A restored cache goes on as if it had never left."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax_models

PROMPT = np.random.default_rng(0).integers(0, 512, 60)
POLICIES = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=16),
    "h2o": kvjax.H2O(budget=16),
    "pyramidkv": kvjax.PyramidKV(budget=24, window=4),
    "ada_kv": kvjax.AdaKV(budget=24, window=4),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_cache_continues_bit_for_bit(tiny, tmp_path, policy, dtype):
    logits, cache = kvjax.prefill(tiny, PROMPT, policy=policy, max_new_tokens=4, cache_dtype=dtype)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    _, cache = kvjax.decode(tiny, cache, token)
    kvjax.save_cache(tmp_path / "cache", cache)
    restored = kvjax.restore_cache(tmp_path / "cache", tiny, policy=policy)
    assert jax.tree.structure(restored) == jax.tree.structure(cache)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    expected, _ = kvjax.decode(tiny, cache, token)
    actual, _ = kvjax.decode(tiny, restored, token)
    np.testing.assert_array_equal(expected, actual)


@pytest.fixture
def saved(tiny, tmp_path):
    _, cache = kvjax.prefill(tiny, PROMPT, policy=POLICIES["h2o"], max_new_tokens=4)
    kvjax.save_cache(tmp_path / "cache", cache)
    return tmp_path / "cache"


def test_rejects_another_policy(tiny, saved):
    other = dataclasses.replace(POLICIES["h2o"], sinks=2)
    with pytest.raises(ValueError, match=r"another policy: H2O.*sinks=4.*sinks=2"):
        kvjax.restore_cache(saved, tiny, policy=other)


def test_rejects_another_model(saved, parity):
    other = kvjax_models.load(parity / "tiny_seed1").params
    with pytest.raises(ValueError, match="another model: ModelSpec"):
        kvjax.restore_cache(saved, other, policy=POLICIES["h2o"])


def test_rejects_another_dtype(tiny, saved):
    with pytest.raises(ValueError, match="another dtype: float32, not bfloat16"):
        kvjax.restore_cache(saved, tiny, policy=POLICIES["h2o"], cache_dtype=jnp.bfloat16)


def test_rejects_a_folder_that_is_no_cache(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder that `kvjax.save_cache` wrote"):
        kvjax.restore_cache(tmp_path, tiny, policy=kvjax.Full())


def test_rejects_a_description_without_its_shapes(tiny, saved):
    about = json.loads((saved / "cache.json").read_text())
    del about["room"]
    (saved / "cache.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="room"):
        kvjax.restore_cache(saved, tiny, policy=POLICIES["h2o"])


def test_does_not_overwrite(tiny, saved):
    _, cache = kvjax.prefill(tiny, PROMPT, policy=kvjax.Full(), max_new_tokens=4)
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        kvjax.save_cache(saved, cache)
