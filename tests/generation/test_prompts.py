"""The forms of a prompt, and prompts longer than the model was trained for."""

import functools
import subprocess
import sys
import warnings

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


@pytest.mark.parametrize(
    "prompt",
    [
        SHORT,
        tuple(SHORT),
        [SHORT],
        np.asarray(SHORT),
        np.asarray([SHORT], np.uint16),
        jnp.asarray(SHORT, jnp.int32),
        jnp.asarray([SHORT], jnp.int32),
        [np.asarray(SHORT)],
    ],
)
def test_ids_may_come_as_lists_and_arrays(model, prompt):
    (row,) = kvjax.prompts.token_rows(prompt, model=model.spec)
    assert row.tolist() == SHORT
    assert row.dtype == np.int32


@pytest.mark.parametrize(
    "prompt", [[SHORT, LONG], (SHORT, LONG), [np.asarray(SHORT), jnp.asarray(LONG)], [np.asarray(SHORT), LONG]]
)
def test_rows_may_have_different_lengths(model, prompt):
    rows = kvjax.prompts.token_rows(prompt, model=model.spec)
    assert [row.tolist() for row in rows] == [SHORT, LONG]
    batch = kvjax.prompts.batch_of(rows)
    assert batch.tokens.shape == (2, 16)
    assert batch.lengths.tolist() == [3, 14]
    assert (batch.tokens[0, 3:] == 0).all()


def test_texts_and_chats_go_through_the_tokenizer(model, chat_words):
    chat = [{"role": "system", "content": "10 11"}, {"role": "user", "content": "12"}]
    forms = {
        "5 6 7": [[1, 5, 6, 7]],
        ("5 6", "7"): [[1, 5, 6], [1, 7]],
        # The template writes its own special tokens.
        "chat": [[1, 400, 10, 11, 2, 3, 401, 12, 2, 3, 402]],
        "chats": [[1, 400, 10, 11, 2, 3, 401, 12, 2, 3, 402], [1, 401, 12, 2, 3, 402]],
        "mixed": [[1, 8], [1, 401, 12, 2, 3, 402]],
    }
    given = {"chat": chat, "chats": [chat, chat[1:]], "mixed": ["8", chat[1:]]}
    for form, wanted in forms.items():
        prompt = given.get(form, list(form) if isinstance(form, tuple) else form)
        rows = kvjax.prompts.token_rows(prompt, model=model.spec, tokenizer=chat_words)
        assert [row.tolist() for row in rows] == wanted
    (row,) = kvjax.prompts.token_rows(chat[1], model=model.spec, tokenizer=chat_words)
    assert row.tolist() == [1, 401, 12, 2, 3, 402]


class Tensor:
    """What has ids for NumPy, as PyTorch's tensors do."""

    def __init__(self, ids):
        self._ids = np.asarray(ids)
        self.ndim = self._ids.ndim

    def __array__(self, dtype=None, copy=None):
        return self._ids


def test_what_hugging_face_tokenizers_give_is_a_prompt(model):
    """Broken by: pads on the left that count as tokens."""
    given = {
        "input_ids": Tensor([[0, 0, *SHORT], [5, 6, 7, 8, 9]]),
        "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    }
    prompts = {"masked": given, "tensors": [Tensor(SHORT), Tensor([5, 6, 7, 8, 9])]}
    for prompt in prompts.values():
        rows = kvjax.prompts.token_rows(prompt, model=model.spec)
        assert [row.tolist() for row in rows] == [SHORT, [5, 6, 7, 8, 9]]
    (row,) = kvjax.prompts.token_rows({"input_ids": SHORT, "attention_mask": [1, 1, 0]}, model=model.spec)
    assert row.tolist() == SHORT[:2]


def test_a_lone_surrogate_is_one_sentence(model, chat_words):
    for prompt in ("5 \ud800", ["5", "6 7 \udfff"], [{"role": "user", "content": "5 \ud800"}]):
        with pytest.raises(ValueError, match=r"`prompt` must be text that UTF-8 can write, got the lone surrogate"):
            run(model, prompt, tokenizer=chat_words)


@pytest.fixture(scope="module")
def short_sighted(model, cut):
    """A model that was trained for 16 tokens."""
    return cut(model, num_hidden_layers=1, max_position_embeddings=16)


def test_warns_of_a_prompt_longer_than_the_model_was_trained_for(short_sighted):
    message = r"14 tokens of prompt and up to 3 new ones are more than the 16 that the model was trained for"
    with pytest.warns(kvjax.LongContextWarning, match=message):
        _, cache = kvjax.prefill(short_sighted, LONG, policy=kvjax.Full(), max_new_tokens=3)
    with pytest.warns(kvjax.LongContextWarning, match=r"25 tokens of prompt and up to 3 new ones"):
        kvjax.extend(short_sighted, cache, MORE)


def test_does_not_warn_where_positions_stay_within_the_cache(short_sighted):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.prefill(short_sighted, LONG, policy=kvjax.Full(), max_new_tokens=2)
        kvjax.prefill(short_sighted, LONG, policy=kvjax.StreamingLLM(budget=10), max_new_tokens=1000)
        masked = kvjax.StreamingLLM(budget=10, prefill_mask="streaming")
        _, cache = kvjax.prefill(short_sighted, LONG + MORE, policy=masked, max_new_tokens=1000)
        kvjax.extend(short_sighted, cache, MORE)


def test_warns_where_a_ring_is_larger_than_the_model_was_trained_for(short_sighted):
    for policy in (kvjax.StreamingLLM(budget=16), kvjax.StreamingLLM(budget=40, prefill_mask="streaming")):
        with pytest.warns(kvjax.LongContextWarning, match=r"14 tokens of prompt and up to 3 new ones"):
            kvjax.prefill(short_sighted, LONG, policy=policy, max_new_tokens=3)
    assert kvjax.StreamingLLM(budget=15).is_bounded(14, 16)


def test_the_warning_points_at_the_callers_line(parity):
    program = f"""
import warnings, dataclasses, kvjax, kvjax_models
from flax import nnx
config = dataclasses.replace(kvjax_models.load({str(parity / "tiny_seed0")!r}).config, num_hidden_layers=1,
                             max_position_embeddings=4)
model = kvjax_models.Llama(config, rngs=nnx.Rngs(0))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", kvjax.LongContextWarning)
    _, cache = kvjax.prefill(model, [5, 6], policy=kvjax.Full(), max_new_tokens=4)
    kvjax.extend(model, cache, [5, 6])
    kvjax.generate(model, [5, 6], max_new_tokens=4)
print([w.filename for w in caught if w.category is kvjax.LongContextWarning])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[-2] == str(["<string>"] * 3)
