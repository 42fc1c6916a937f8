"""The real model: Hugging Face's logits and answers, and what compression does to text that means something."""

import inspect
import json
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation.needle import needle

pytestmark = pytest.mark.smollm2

SHORT = ["capital", "story", "plain", "unicode"]
POLICIES = {
    "streaming_llm": kvjax.StreamingLLM(budget=64),
    "snapkv": kvjax.SnapKV(budget=64, window=16),
    "h2o": kvjax.H2O(budget=64),
}


@pytest.fixture(scope="module")
def record(parity):
    return json.loads((parity / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def prompts(record):
    """Four short prompts, and 300 tokens of a long one."""
    return [*(record[name]["input_ids"] for name in SHORT), record["long"]["input_ids"][:300]]


def assert_best_ten(row: jax.Array, expected: dict) -> None:
    logits = np.asarray(row)
    assert np.argsort(-logits)[:10].tolist() == expected["top_ids"]
    largest = np.abs(logits[expected["top_ids"]] - expected["top_logits"]).max()
    assert largest < 2e-3, f"the largest difference is {largest:.1e}"


def test_a_ragged_batch_gives_hugging_faces_logits_and_answers(smollm2, record, prompts):
    logits, _ = kvjax.prefill(smollm2.params, prompts, policy=kvjax.Full(), max_new_tokens=32)
    result = kvjax.generate(smollm2.params, prompts, max_new_tokens=32)
    for row, name in enumerate(SHORT):
        assert_best_ten(logits[row], record[name])
        assert result.tokens[row, : result.lengths[row]].tolist() == record[name]["greedy_ids"]
    assert result.finish_reasons[:2] == ["stop", "length"]


def test_a_prompt_of_thousands_of_tokens_gives_hugging_faces_logits_and_answer(smollm2, record):
    expected = record["long"]
    logits, cache = kvjax.prefill(smollm2.params, expected["input_ids"], policy=kvjax.Full(), max_new_tokens=32)
    assert_best_ten(logits[0], expected)
    answer = []
    for _ in range(32):
        answer.append(int(logits[0].argmax()))
        logits, cache = kvjax.decode(smollm2.params, cache, [answer[-1]])
    assert answer == expected["greedy_ids"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_does_not_depend_on_its_neighbours(smollm2, prompts, name):
    # A long row in every batch, so that all have one shape; that a row alone gives the same: test_generation.py.
    together = kvjax.generate(smollm2.params, prompts, policy=POLICIES[name], max_new_tokens=16)
    others = [prompts[4], *prompts[3::-1]]
    turned = kvjax.generate(smollm2.params, others, policy=POLICIES[name], max_new_tokens=16)
    np.testing.assert_array_equal(together.tokens, turned.tokens[[4, 3, 2, 1, 0]])
    # Short rows are within the budget: Hugging Face's answers again.
    assert smollm2.tokenizer.decode(together.tokens[0, :8].tolist()) == "The capital of France is Paris."


def test_a_compressed_cache_still_knows_a_fact_that_a_window_has_lost(smollm2):
    task = needle(smollm2.tokenizer, tokens=2000, depth=1 / 3, seed=1)
    answers = {}
    for policy in (kvjax.SnapKV(budget=256), kvjax.StreamingLLM(budget=256)):
        result = kvjax.generate(
            smollm2.params, task.prompt, policy=policy, tokenizer=smollm2.tokenizer, max_new_tokens=12
        )
        assert result.stats.kept_tokens <= 256 + 12
        assert result.texts is not None
        answers[type(policy)] = result.texts[0]
    assert task.answer in answers[kvjax.SnapKV]
    assert task.answer not in answers[kvjax.StreamingLLM]


def test_without_sinks_a_stream_loses_the_thread(smollm2):
    # Prose that every Python brings along.
    text = "\n\n".join(inspect.cleandoc(pydoc_data.topics.topics[name]) for name in ("typesmapping", "import", "class"))
    ids = smollm2.tokenizer.encode(text, add_special_tokens=False)[:1537]
    assert len(ids) == 1537
    losses = {}
    for sinks in (4, 0):
        policy = kvjax.StreamingLLM(window=60, sinks=sinks, prefill_mask="streaming")
        _, cache = kvjax.prefill(smollm2.params, ids[:768], policy=policy, max_new_tokens=1)
        size = kvjax.cache_bytes(cache)
        logits, cache = kvjax.extend(smollm2.params, cache, ids[768:1536], logits="all")
        assert kvjax.cache_bytes(cache) == size
        assert logits.shape == (1, 768, 49152)
        # How unlikely each of the last 500 tokens is, in nats.
        log_probabilities = jax.nn.log_softmax(logits[0, -500:], axis=-1)
        losses[sinks] = -float(jnp.take_along_axis(log_probabilities, jnp.asarray(ids[-500:])[:, None], axis=1).mean())
    # Measured: 2.35 and 3.29, perplexities of 10 and 27.
    assert losses[4] < 3
    assert losses[0] > losses[4] + 0.6
