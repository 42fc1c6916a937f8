"""What cannot be is said before anything is traced."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.decoding
import kvjax.prompts
import kvjax.steps

NEW = 8
RNG = np.random.default_rng(5)
# All fit one bucket of 16 tokens, so that few shapes are compiled.
LONG, SHORT, WHOLE = (RNG.integers(3, 512, length).tolist() for length in (14, 3, 16))
MORE = RNG.integers(3, 512, 11).tolist()

run = functools.partial(kvjax.generate, max_new_tokens=NEW, stop_tokens=())


unchecked = pytest.mark.usefixtures("no_shape_checks")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"`prompt` must have at least one token, got none"),
        ([[]], r"`prompt` must have at least one token, got none"),
        ([SHORT, []], r"`prompt` must have at least one token, got none in row 1"),
        (np.zeros((0, 4), np.int32), r"`prompt` has no rows"),
        (np.zeros((2, 0), np.int32), r"`prompt` must have at least one token, got none in row 0"),
        ([1, 2, 512], r"`prompt` ids must be from 0 to 511, got 512 in row 0"),
        ([[1], [5, -1]], r"`prompt` ids must be from 0 to 511, got -1 in row 1"),
        ([1.0, 2.0], r"`prompt` ids must be integers, got float64"),
        (np.asarray([1.0]), r"`prompt` ids must be integers, got float64"),
        ([True, False], r"`prompt` ids must be integers, got bool"),
        (np.zeros((1, 1, 1), np.int32), r"`prompt` must be ids \[n\] or \[B, n\], got an array of shape \(1, 1, 1\)"),
        ([[[1, 2]]], r"`prompt` rows must be ids \[n\], got shape \(1, 2\)"),
        (7, r"`prompt` must be token ids, text or a chat, got int"),
        ({1, 2}, r"`prompt` must be token ids, text or a chat, got set"),
        ("a text", r"a text prompt needs a `tokenizer`"),
        (["a text"], r"a text prompt needs a `tokenizer`"),
        ([True, 5], r"`prompt` ids must be integers, got bool"),
        ([5, "x"], r"`prompt` ids must be integers, got <U21"),
        ([2**70], r"`prompt` ids must be integers, got object"),
        ([[[1], [2, 3]]], r"`prompt` rows must be ids \[n\], got list"),
        (np.asarray([[1], [2, 3]], object), r"`prompt` ids must be integers, got object"),
        (b"text", r"`prompt` must be token ids, text or a chat, got bytes"),
        ({"ids": [5]}, r"a chat's messages must be .*, got {'ids': \[5\]}"),
        ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, r"must mark one stretch of each row .*\[1, 0, 1\]"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 1], [1, 1]]}, r"must have 1 rows, got 2"),
        ([{"role": "user", "content": "5"}], r"a chat needs a `tokenizer` with a chat template"),
    ],
)
@unchecked
def test_says_what_is_wrong_with_a_prompt(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        kvjax.generate(model, prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, r"`max_new_tokens` must be at least 1, got 0"),
        ({"max_new_tokens": -4}, r"`max_new_tokens` must be at least 1, got -4"),
        ({"max_new_tokens": 1.5}, r"`max_new_tokens` must be an integer, got 1.5"),
        ({"max_new_tokens": True}, r"`max_new_tokens` must be at least 1, got True"),
        ({"policy": "snapkv"}, r"`policy` must be a policy such as `kvjax.SnapKV\(budget=1024\)`, got 'snapkv'"),
        (
            {"policy": kvjax.SnapKV},
            r"`policy` must be a policy such as `SnapKV\(...\)`, with its .* class Sna",
        ),
        ({"max_new_tokens": 2**31}, r"`max_new_tokens` must be below 2\*\*30 = 1073741824, got 2147483648"),
        ({"tokenizer": "gpt2"}, r"`tokenizer` must be an object with `encode` and `decode`, .* got 'gpt2'"),
        ({"callback": "print"}, r"`callback` must be a function of a `NewToken`, got 'print'"),
        ({"stop_strings": None}, r"`stop_strings` must be a text or a list of texts, got None"),
        ({"temperature": None}, r"`temperature` must be a number, got None"),
        ({"temperature": True}, r"`temperature` must be a number, got True"),
        ({"temperature": float("inf")}, r"`temperature` must be 0 or more and finite, got inf"),
        ({"top_p": "0.9"}, r"`top_p` must be a number, got '0.9'"),
        ({"seed": True}, r"`seed` must be an integer, or one for each row, got True"),
        ({"seed": np.asarray([1.0])}, r"`seed` must be an integer, or one for each row, got array"),
        ({"temperature": -1.0}, r"`temperature` must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, r"`temperature` must be 0 or more, got nan"),
        ({"top_k": 0}, r"`top_k` must be an integer of at least 1, got 0"),
        ({"top_k": 1.5}, r"`top_k` must be an integer of at least 1, got 1.5"),
        ({"top_p": 0.0}, r"`top_p` must be over 0 and at most 1, got 0.0"),
        ({"min_p": 1.5}, r"`min_p` must be over 0 and at most 1, got 1.5"),
        ({"seed": [1, 2]}, r"`seed` must be one number, or one for each of the 1 rows, got 2"),
        ({"seed": 1.5}, r"`seed` must be an integer, or one for each row, got 1.5"),
        ({"stop_tokens": 512}, r"`stop_tokens` must be from 0 to 511, got 512"),
        ({"stop_tokens": [3, -1]}, r"`stop_tokens` must be from 0 to 511, got -1"),
        ({"stop_tokens": 1.5}, r"`stop_tokens` must be integers, got 1.5"),
        ({"stop_tokens": "</s>"}, r"`stop_tokens` must be integers, got '</s>'"),
        ({"stop_strings": "x"}, r"`stop_strings` need a `tokenizer`"),
        ({"cache_dtype": "float16"}, r"`cache_dtype` must be float32 or bfloat16, got float16"),
        ({"cache_dtype": "half a byte"}, r"`cache_dtype` must be float32 or bfloat16, got half a byte"),
        ({"cache_dtype": jnp.int8}, r"`cache_dtype` must be float32 or bfloat16, got int8"),
        ({"cache": {}}, r"`cache` must be a kvjax.Cache, got dict"),
        ({"policy": kvjax.SnapKV(budget=0.5, window=4)}, r"`budget` = 0.5 of the 3 tokens of row 0 is 1 tokens"),
        ({"policy": kvjax.StreamingLLM(budget=0.5)}, r"`budget` = 0.5 of the 3 tokens of row 0 is 1 tokens"),
    ],
)
@unchecked
def test_says_what_is_wrong_with_an_argument(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        kvjax.generate(model, SHORT, **arguments)


@unchecked
def test_says_that_params_are_not_a_model(model):
    class Loaded:
        params = model

    loaded: Any = Loaded()
    nothing: Any = {}
    with pytest.raises(ValueError, match=r"`params` must be a model .* got Loaded \(did you mean its `.params`\?\)"):
        kvjax.generate(loaded, SHORT)
    with pytest.raises(ValueError, match=r"`params` must be a model .* got dict\."):
        kvjax.prefill(nothing, SHORT, policy=kvjax.Full(), max_new_tokens=1)


@unchecked
def test_says_that_a_cache_is_of_another_model_policy_or_batch(model, tiny):
    cache = run(model, LONG, policy=kvjax.Full()).cache
    with pytest.raises(ValueError, match=r"`cache` belongs to another model"):
        run(tiny, MORE, cache=cache)
    with pytest.raises(ValueError, match=r"`cache` belongs to another model"):
        kvjax.extend(tiny, cache, MORE)
    with pytest.raises(ValueError, match=r"`policy` must be the one of the `cache`, Full\(\), or None; got Stream"):
        run(model, MORE, cache=cache, policy=kvjax.StreamingLLM(budget=10))
    with pytest.raises(ValueError, match=r"`cache_dtype` must be the one of the `cache`, float32; got bfloat16"):
        run(model, MORE, cache=cache, cache_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"`prompt` must have a row for each of the cache's 1, got 2"):
        run(model, [MORE, MORE], cache=cache)
    with pytest.raises(ValueError, match=r"`tokens` must have a row for each of the cache's 1, got 2"):
        kvjax.extend(model, cache, [MORE, MORE])
    not_a_cache: Any = ()
    with pytest.raises(ValueError, match=r"`cache` must be a kvjax.Cache, got tuple"):
        kvjax.decode(model, not_a_cache, [1])


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ([1], r"`token` must be integers, one for each of the cache's 2 rows, got int64 of shape \(1,\)"),
        (5, r"one for each of the cache's 2 rows, got int64 of shape \(\)"),
        ([[1, 2]], r"got int64 of shape \(1, 2\)"),
        ([1.0, 2.0], r"`token` must be integers, .* got float64 of shape \(2,\)"),
        ([1, 512], r"`token` must be below 512, got 512"),
    ],
)
def test_says_what_is_wrong_with_a_token(model, two_rows, token, message):
    with pytest.raises(ValueError, match=message):
        kvjax.decode(model, two_rows, token)


@pytest.fixture(scope="module")
def two_rows(model):
    return kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)[1]


def test_says_which_layers_a_model_forgot(model):
    class Forgetful:
        spec = model.spec

        def __call__(self, tokens, attend):
            x = jnp.zeros((*tokens.shape, 2, 16))
            attend(1, jnp.zeros((*tokens.shape, 8, 16)), x, x)
            return x[..., 0]

        def logits(self, hidden):
            return hidden

    jax.tree_util.register_static(Forgetful)
    with pytest.raises(ValueError, match=r"the model did not call `attend` for layers \[0\] of 2"):
        kvjax.prefill(Forgetful(), SHORT, policy=kvjax.Full(), max_new_tokens=1)


def steps_of(model):
    prefill = functools.partial(kvjax.prefill, policy=kvjax.Full(), max_new_tokens=2)
    return prefill, prefill(model, SHORT)[1]


@unchecked
@pytest.mark.parametrize("logits", ["every", "Last", None, True])
def test_logits_are_of_the_last_token_or_of_all(model, two_rows, logits):
    with pytest.raises(ValueError, match=r'`logits` must be "last" or "all", got '):
        kvjax.prefill(model, SHORT, policy=kvjax.Full(), max_new_tokens=2, logits=logits)
    with pytest.raises(ValueError, match=r'`logits` must be "last" or "all", got '):
        kvjax.extend(model, two_rows, [SHORT, SHORT], logits=logits)


@unchecked
def test_what_cannot_be_traced_says_so_in_one_sentence(model):
    prefill, cache = steps_of(model)
    ids = jnp.asarray(SHORT)
    with pytest.raises(ValueError, match=r"`params` must be known arrays, got traced ones: `generate` looks at its"):
        jax.jit(lambda params: run(params, SHORT).tokens)(model)
    with pytest.raises(ValueError, match=r"`prompt` must be ids that are known, got traced ones"):
        jax.jit(lambda tokens: run(model, tokens).tokens)(ids)
    with pytest.raises(ValueError, match=r"`tokens` must be ids that are known, got traced ones"):
        jax.jit(prefill)(model, ids)
    with pytest.raises(ValueError, match=r"`cache` must be of known arrays, got traced ones"):
        jax.jit(lambda cache: kvjax.extend(model, cache, SHORT))(cache)
    with pytest.raises(NotImplementedError, match=r"`kvjax.prefill` has no gradient in the model's arrays"):
        jax.grad(lambda params: prefill(params, SHORT)[0].sum())(model)


def test_a_donated_cache_used_again_is_one_sentence(model):
    _, cache = steps_of(model)
    kvjax.decode(model, cache, [5])
    for use in (kvjax.decode, kvjax.extend):
        with pytest.raises(ValueError, match=r"`cache` was donated to an earlier call: use the cache that the call"):
            use(model, cache, [5])
    with pytest.raises(ValueError, match=r"`cache` was donated"):
        run(model, [5], cache=cache)


@unchecked
def test_layers_under_scan_are_told_to_be_unrolled(model):
    class Scanned:
        spec = model.spec

        def __call__(self, tokens, attend):
            x = jnp.zeros((*tokens.shape, 8, 16))
            return jax.lax.scan(lambda x, layer: (attend(layer, x, x[:, :, :2], x[:, :, :2]), None), x, jnp.arange(2))

        def logits(self, hidden):
            return hidden

    jax.tree_util.register_static(Scanned)
    prefill: Any = kvjax.prefill
    with pytest.raises(ValueError, match=r"called `attend` with a traced layer, as under `jax.lax.scan` over layers"):
        prefill(Scanned(), SHORT, policy=kvjax.Full(), max_new_tokens=1)


def test_a_mesh_with_explicit_axes_is_told_to_be_made_otherwise(model):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    params = jax.device_put(model, jax.NamedSharding(mesh, jax.P()))
    with pytest.raises(ValueError, match=r"`params` must not lie on a mesh with Explicit axes, .*AxisType.Auto"):
        run(params, SHORT)


@unchecked
def test_a_policy_must_be_hashable(model):
    @dataclasses.dataclass(frozen=True)
    class Mutable(kvjax.Full):
        names: list

    with pytest.raises(ValueError, match=r"`policy` must be hashable, .* `dataclasses.dataclass\(frozen=True\)`"):
        run(model, SHORT, policy=Mutable(names=[]))
