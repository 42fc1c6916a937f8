"""`generate`, `prefill`, `extend` and `decode` on a small random model."""

import dataclasses
import functools
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax.decoding
import kvjax.prompts
import kvjax.steps
import kvjax_models
from kvjax.rope import Rope
from kvjax.state import for_platform, whole_rows

NEW = 8
RNG = np.random.default_rng(5)
# All fit one bucket of 16 tokens, so that few shapes are compiled.
LONG, SHORT, WHOLE = (RNG.integers(3, 512, length).tolist() for length in (14, 3, 16))
MORE = RNG.integers(3, 512, 11).tolist()

POLICIES = {
    "full": lambda budget: kvjax.Full(),
    "streaming_llm": lambda budget: kvjax.StreamingLLM(budget=budget),
    "streaming_llm_masked": lambda budget: kvjax.StreamingLLM(budget=budget, prefill_mask="streaming"),
    "snapkv": lambda budget: kvjax.SnapKV(budget=budget, window=4, kernel=3),
    "h2o": lambda budget: kvjax.H2O(budget=budget),
}
# Those whose heads have different lengths, where shapes are what is tested.
UNEQUAL = {
    "ada_kv": lambda budget: kvjax.AdaKV(budget=budget, window=4, kernel=3),
    "pyramidkv": lambda budget: kvjax.PyramidKV(budget=budget, window=4, kernel=3),
    "duo_attention": lambda budget: kvjax.DuoAttention(pattern=PATTERN, sinks=4, recent=budget - 4),
}
PATTERN = kvjax.HeadPattern.of([[0.1, 0.9], [0.8, 0.7], [0.2, 0.3], [0.6, 0.4]])


@pytest.fixture(scope="module")
def model(tiny):
    """The first two layers of the random Llama: half the time to compile."""
    return cut(tiny, num_hidden_layers=2)


def cut(llama: kvjax_models.Llama, **changes) -> kvjax_models.Llama:
    """A model with the same weights and another configuration."""
    config = dataclasses.replace(llama.config, **changes)
    other = kvjax_models.Llama(config, rngs=nnx.Rngs(0))
    other.embedding, other.norm, other.lm_head = llama.embedding, llama.norm, llama.lm_head
    other.layers = nnx.List(list(llama.layers)[: config.num_hidden_layers])
    return other


@pytest.fixture
def policy(request):
    return (POLICIES | UNEQUAL)[request.param](10)


each_policy = pytest.mark.parametrize("policy", POLICIES, indirect=True)


class Words:
    """A tokenizer whose token 17 is the text "17 "."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [int(word) for word in text.split()]

    def decode(self, ids, /, *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids if not (skip_special_tokens and token == 2))


class ChatWords(Words):
    def apply_chat_template(self, messages, *, add_generation_prompt: bool) -> str:
        return " ".join(message["content"] for message in messages) + " 400" * add_generation_prompt


run = functools.partial(kvjax.generate, max_new_tokens=NEW, stop_tokens=())


# --- the forms of a prompt ---


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


def test_texts_and_chats_go_through_the_tokenizer(model):
    chat = [{"role": "system", "content": "10 11"}, {"role": "user", "content": "12"}]
    forms = {
        "5 6 7": [[1, 5, 6, 7]],
        ("5 6", "7"): [[1, 5, 6], [1, 7]],
        # The template writes its own special tokens.
        "chat": [[10, 11, 12, 400]],
        "chats": [[10, 11, 12, 400], [12, 400]],
        "mixed": [[1, 8], [12, 400]],
    }
    given = {"chat": chat, "chats": [chat, chat[1:]], "mixed": ["8", chat[1:]]}
    for form, wanted in forms.items():
        prompt = given.get(form, list(form) if isinstance(form, tuple) else form)
        rows = kvjax.prompts.token_rows(prompt, model=model.spec, tokenizer=ChatWords())
        assert [row.tolist() for row in rows] == wanted
    (row,) = kvjax.prompts.token_rows(chat[1], model=model.spec, tokenizer=ChatWords())
    assert row.tolist() == [12, 400]


# --- batches ---


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@each_policy
def test_rows_of_different_lengths_give_what_each_gives_alone(model, policy, sampling):
    together = run(model, [SHORT, LONG], policy=policy, **sampling)
    for row, prompt in enumerate([SHORT, LONG]):
        # Row b draws with seed + b.
        own = {**sampling, "seed": sampling["seed"] + row} if sampling else {}
        alone = run(model, prompt, policy=policy, **own)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        for layer in range(2):
            for head in range(2):
                np.testing.assert_array_equal(
                    kvjax.kept_positions(together.cache)[layer][row][head],
                    kvjax.kept_positions(alone.cache)[layer][0][head],
                )


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_for_everything_the_tokens_are_fulls(model, name):
    prompts = [SHORT, LONG]
    np.testing.assert_array_equal(run(model, prompts, policy=POLICIES[name](22)).tokens, run(model, prompts).tokens)


def test_a_small_budget_gives_other_tokens(model):
    full = run(model, [SHORT, LONG]).tokens
    for name in ("streaming_llm", "streaming_llm_masked", "snapkv"):
        tokens = run(model, [SHORT, LONG], policy=POLICIES[name](10)).tokens
        assert (tokens[1] != full[1]).any()


# --- where an answer ends ---


def test_a_stop_token_ends_its_row_while_others_go_on(model):
    free = run(model, [LONG, SHORT])
    stop = int(free.tokens[0, 2])
    assert stop not in free.tokens[0, :2]
    assert stop not in free.tokens[1]
    result = run(model, [LONG, SHORT], stop_tokens=[stop])
    assert result.lengths.tolist() == [3, NEW]
    assert result.finish_reasons == ["stop", "length"]
    np.testing.assert_array_equal(result.tokens[0], [*free.tokens[0, :3], 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(result.tokens[1], free.tokens[1])
    # The cache of the row that ended stands still; it holds the stop token too.
    assert result.cache.next_position.tolist() == [17, 11]
    for layer in kvjax.kept_positions(result.cache):
        for row, end in enumerate((17, 11)):
            for head in layer[row]:
                np.testing.assert_array_equal(head, np.arange(end))
    assert result.stats.new_tokens == (3, NEW)


@pytest.mark.usefixtures("no_shape_checks")
def test_stop_tokens_may_be_a_number_or_an_array(model):
    stop = int(run(model, [LONG, SHORT]).tokens[0, 2])
    forms: list[Any] = [stop, np.int64(stop), (stop,), np.asarray([stop])]
    for form in forms:
        assert run(model, [LONG, SHORT], stop_tokens=form).lengths.tolist() == [3, NEW]


def test_the_models_own_stop_tokens_hold_unless_others_are_given(model):
    free = run(model, LONG)
    stop = int(free.tokens[0, 1])
    ends = cut(model, eos_token_ids=(511, stop))
    result = kvjax.generate(ends, LONG, max_new_tokens=NEW)
    assert result.lengths.tolist() == [2]
    assert result.finish_reasons == ["stop"]
    assert result.tokens[0].tolist() == [*free.tokens[0, :2], 0, 0, 0, 0, 0, 0]
    on = run(ends, LONG)
    assert on.lengths.tolist() == [NEW]
    assert on.finish_reasons == ["length"]
    np.testing.assert_array_equal(on.tokens, free.tokens)


def test_an_answer_that_ends_with_a_stop_token_at_full_length_was_stopped(model):
    last = int(run(model, LONG).tokens[0, -1])
    result = run(model, LONG, stop_tokens=last)
    assert result.lengths.tolist() == [NEW]
    assert result.finish_reasons == ["stop"]


def test_stop_strings_end_a_row_and_are_not_in_its_text(model):
    free = run(model, [LONG, SHORT])
    stop = f" {free.tokens[0, 2]} {free.tokens[0, 3]}"
    result = run(model, [LONG, SHORT], tokenizer=Words(), stop_strings=stop)
    assert result.lengths.tolist() == [4, NEW]
    assert result.finish_reasons == ["stop", "length"]
    assert result.texts == [f"{free.tokens[0, 0]} {free.tokens[0, 1]}", Words().decode(free.tokens[1])]
    assert result.tokens[0].tolist() == [*free.tokens[0, :4], 0, 0, 0, 0]
    assert result.cache.next_position.tolist() == [18, 11]


def test_a_callback_sees_every_token_and_the_text_as_it_comes(model):
    seen = []
    free = run(model, [LONG, SHORT], tokenizer=Words())
    stop = int(free.tokens[0, 2])
    result = run(model, [LONG, SHORT], tokenizer=Words(), stop_tokens=stop, callback=seen.append)
    assert free.texts == [Words().decode(row) for row in free.tokens]
    assert len(seen) == NEW
    tokens = np.stack([new.tokens for new in seen], axis=1)
    np.testing.assert_array_equal(tokens[0], [*free.tokens[0, :3], *[-1] * (NEW - 3)])
    np.testing.assert_array_equal(tokens[1], free.tokens[1])
    assert ["".join(new.texts[row] for new in seen) for row in range(2)] == result.texts
    assert result.texts == [Words().decode(row[:length]) for row, length in zip(free.tokens, (3, NEW), strict=True)]
    without = []
    run(model, [LONG, SHORT], callback=without.append)
    assert all(new.texts is None for new in without)
    np.testing.assert_array_equal(np.stack([new.tokens for new in without], axis=1), free.tokens)


def test_text_that_was_held_back_for_a_stop_string_comes_at_the_end(model):
    seen = []
    result = run(model, SHORT, tokenizer=Words(), stop_strings=["never in there"], callback=seen.append)
    assert result.texts == ["".join(new.texts[0] for new in seen)] == [Words().decode(result.tokens[0])]


# --- the cache afterwards ---


def test_the_cache_holds_the_prompt_and_every_returned_token(model):
    result = run(model, [SHORT, LONG])
    assert result.cache.next_position.tolist() == [3 + NEW, 14 + NEW]
    for layer in kvjax.kept_positions(result.cache):
        for row, end in enumerate((3 + NEW, 14 + NEW)):
            for head in layer[row]:
                np.testing.assert_array_equal(head, np.arange(end))


def test_a_second_prompt_goes_on_where_the_first_answer_ended(model):
    first = run(model, LONG)
    # Twice: the cache of a result stays valid.
    second, again = (run(model, MORE, cache=first.cache) for _ in range(2))
    whole = run(model, [*LONG, *first.tokens[0].tolist(), *MORE])
    np.testing.assert_array_equal(second.tokens, whole.tokens)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert second.stats.prompt_tokens == (11,)
    assert second.stats.seen_tokens == 14 + NEW + 11 + NEW


def test_rows_of_a_second_prompt_may_have_different_lengths(model):
    first = run(model, [SHORT, LONG])
    second = run(model, [MORE, SHORT], cache=first.cache)
    for row, (prompt, more) in enumerate([(SHORT, MORE), (LONG, SHORT)]):
        whole = run(model, [*prompt, *first.tokens[row].tolist(), *more])
        np.testing.assert_array_equal(second.tokens[row], whole.tokens[0])


def test_chunks_give_what_one_prompt_gives(model):
    tokens = [*LONG, *MORE]
    whole, _ = kvjax.prefill(model, tokens, policy=kvjax.Full(), max_new_tokens=1, logits="all")
    logits, cache = kvjax.prefill(model, tokens[:7], policy=kvjax.Full(), max_new_tokens=1, logits="all")
    np.testing.assert_allclose(logits[0, :7], whole[0, :7], atol=1e-4)
    for start, end in ((7, 8), (8, 20), (20, 25)):
        logits, cache = kvjax.extend(model, cache, tokens[start:end], logits="all")
        np.testing.assert_allclose(logits[0, : end - start], whole[0, start:end], atol=1e-4)
    assert cache.next_position.tolist() == [25]


def test_the_last_logits_are_those_of_each_rows_last_token(model):
    every, _ = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW, logits="all")
    last, _ = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    assert every.shape == (2, 16, 512)
    assert last.dtype == jnp.float32
    np.testing.assert_allclose(last, [every[0, 2], every[1, 13]], atol=1e-5)


def test_positions_go_on_at_the_true_length_whatever_has_gone(model):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=POLICIES["snapkv"](10), max_new_tokens=NEW)
    _, cache = kvjax.extend(model, cache, [MORE, MORE[:5]])
    assert cache.next_position.tolist() == [14, 19]
    assert cache.room == NEW
    for layer in kvjax.kept_positions(cache):
        for row, end in enumerate((14, 19)):
            for head in layer[row]:
                assert len(head) == 10
                np.testing.assert_array_equal(head[-4:], np.arange(end - 4, end))
    _, cache = kvjax.decode(model, cache, [5, 6])
    assert [int(layer.positions.max()) for layer in cache.layers] == [19, 19]


@each_policy
def test_prefill_and_decode_by_hand_are_generate(model, policy):
    result = run(model, [SHORT, LONG], policy=policy)
    logits, cache = kvjax.prefill(model, [SHORT, LONG], policy=policy, max_new_tokens=NEW)
    for step in range(NEW):
        token = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(token, result.tokens[:, step])
        logits, cache = kvjax.decode(model, cache, token)
    assert kvjax.cache_bytes(cache) == kvjax.cache_bytes(result.cache)
    for spec, by_hand, looped in zip(cache.specs, cache.layers, result.cache.layers, strict=True):
        np.testing.assert_array_equal(by_hand.positions, looped.positions)
        np.testing.assert_allclose(whole_rows(by_hand, spec), whole_rows(looped, spec), atol=1e-5)


@pytest.fixture
def filled(model):
    """A cache with all slots taken in row 1, whose prompt fills its bucket."""
    _, cache = kvjax.prefill(model, [SHORT, WHOLE], policy=kvjax.Full(), max_new_tokens=NEW)
    for _ in range(NEW):
        logits, cache = kvjax.decode(model, cache, [5, 6])
        assert np.isfinite(logits).all()
    return cache


def test_writing_past_capacity_is_an_error_and_extend_makes_room(model, filled):
    message = r"the cache has no slot left for row 1: it was made with `max_new_tokens=8`; .*`kvjax.extend`"
    with pytest.raises(ValueError, match=message):
        kvjax.decode(model, filled, [5, 6])
    # A row that stands still needs no slot.
    _, cache = kvjax.decode(model, filled, [5, -1], donate=False)
    assert cache.next_position.tolist() == [12, 24]
    _, cache = kvjax.extend(model, filled, [[7], [8]], max_new_tokens=2)
    logits, cache = kvjax.decode(model, cache, [5, 6])
    assert np.isfinite(logits).all()
    assert cache.next_position.tolist() == [13, 26]


def test_under_jit_writing_past_capacity_gives_nan(model, filled):
    decode = jax.jit(lambda params, cache, token: kvjax.decode(params, cache, token, donate=False))
    logits, after = decode(model, filled, jnp.asarray([5, 6], jnp.int32))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    rows, rows_after = (whole_rows(cache.layers[0], cache.specs[0]) for cache in (filled, after))
    np.testing.assert_array_equal(rows[1], rows_after[1])


def test_a_negative_token_leaves_its_row_as_it_is(model):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    _, after = kvjax.decode(model, cache, [-1, 7], donate=False)
    assert after.next_position.tolist() == [3, 15]
    for before_layer, after_layer in zip(cache.layers, after.layers, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), before_layer, after_layer)


def test_a_donated_cache_is_gone_and_one_that_is_not_stays(model):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    # A copy: a view would keep the buffer from being donated.
    before = jax.tree.map(np.array, cache.layers[0])
    kept, _ = kvjax.decode(model, cache, [5, 6], donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    jax.tree.map(np.testing.assert_array_equal, cache.layers[0], before)
    donated, after = kvjax.decode(model, cache, [5, 6])
    np.testing.assert_array_equal(kept, donated)
    assert all(leaf.is_deleted() for layer in cache.layers for leaf in jax.tree.leaves(layer.kv))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


# --- what it costs ---


def compilations() -> tuple[int, ...]:
    steps: tuple[Any, ...] = (kvjax.steps._prefill, kvjax.steps._extend, kvjax.decoding.decode_loop)
    return tuple(step._cache_size() for step in steps)


@pytest.mark.parametrize("policy", [*POLICIES, "pyramidkv"], indirect=True)
def test_nothing_is_compiled_again_for_other_values_of_the_same_shape(model, policy):
    # A setting is switched on by another value than 0 or None; its value is an array like any other.
    run(model, [SHORT, LONG], policy=policy, temperature=1.0, top_p=0.9)
    first = compilations()
    run(model, [LONG, MORE], policy=dataclasses.replace(policy), temperature=0.3, top_p=0.5, seed=99)
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": [4, 5], "callback": lambda new: None}
    run(model, [[7], WHOLE], policy=policy, **settings)
    assert compilations() == first


def test_another_turn_of_the_same_bucket_is_compiled_once(model):
    first = run(model, LONG[:9])
    run(model, MORE, cache=first.cache)
    before = compilations()
    other = run(model, LONG[:10])
    run(model, MORE[:6], cache=other.cache)
    assert compilations() == before


@pytest.fixture(scope="module")
def wide(tiny):
    """A model whose cached rows are large beside its queries."""
    config = dataclasses.replace(
        tiny.config,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=64,
        rope=Rope(head_dim=64),
    )
    return kvjax_models.Llama(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", [*POLICIES, *UNEQUAL])
@pytest.mark.usefixtures("no_shape_checks")  # Lowering makes a cache of descriptions, not of arrays.
def test_a_decoding_step_writes_into_the_cache_it_was_given(wide, name):
    policy = (POLICIES | UNEQUAL)[name](1024)
    logits, cache = kvjax.prefill(wide, np.arange(1024) % 64, policy=policy, max_new_tokens=NEW)
    size = kvjax.cache_bytes(cache)
    # Beside the cache, room for one layer's rows: that is where NaN in empty slots would be cleared.
    allowed = max(sum(leaf.nbytes for leaf in jax.tree.leaves(layer.kv)) for layer in cache.layers)
    leaves, structure = jax.tree.flatten(wide)
    token = jnp.zeros(1, jnp.int32)
    progress = kvjax.decoding.Progress.start(cache, logits, room=NEW)
    settings = {"stops": jnp.zeros(1, jnp.int32), "keys": jax.random.split(jax.random.key(0), 1), "sampling": None}
    steps = {
        "decode": kvjax.steps._decode_donated.lower(leaves, cache, token, structure=structure),
        "generate": kvjax.decoding.decode_loop.lower(leaves, progress, structure=structure, steps=NEW, **settings),
    }
    for step, lowered in steps.items():
        memory: Any = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size, step
        assert memory.temp_size_in_bytes < 1.1 * allowed, f"{step}: {memory.temp_size_in_bytes}, not {allowed}"


@pytest.mark.parametrize("name", [*POLICIES, *UNEQUAL])
def test_a_prefill_takes_no_more_room_with_more_layers(tiny, name):
    """Broken by: every layer's rows held until all choices are made at the end; buffers made at the start."""
    policy = (POLICIES | UNEQUAL)[name](16)
    tokens = np.zeros((1, 1024), np.int32)
    room = []
    for layers in (2, 4):
        llama = cut(tiny, num_hidden_layers=layers)
        if name == "duo_attention":
            policy = kvjax.DuoAttention(pattern=kvjax.HeadPattern.of(PATTERN.scores[:layers]), sinks=4, recent=12)
        specs = for_platform(policy.layer_specs(llama.spec, 1024, NEW, shortest=1024), None)
        leaves, structure = jax.tree.flatten(llama)
        settings = {"structure": structure, "policy": policy, "specs": specs, "room": NEW, "logits": "last"}
        lowered = kvjax.steps._prefill.lower(leaves, tokens, np.full(1, 1024, np.int32), **settings)
        memory: Any = lowered.compile().memory_analysis()
        room.append(memory.temp_size_in_bytes)
    queries = 1024 * tiny.spec.num_query_heads * tiny.spec.head_dim * 4
    assert room[1] - room[0] < queries / 2, (
        f"{room}: each further layer takes as much as its queries, {queries}, or more"
    )


def test_statistics_are_those_by_hand(model):
    result = run(model, [SHORT, LONG], policy=POLICIES["snapkv"](10))
    stats = result.stats
    assert stats.prompt_tokens == (3, 14)
    assert stats.new_tokens == (8, 8)
    # 3 and 10 tokens are kept of the prompts, and 8 are decoded.
    assert stats.kept_tokens == (11 + 18) / 2
    assert stats.seen_tokens == (11 + 22) / 2
    # Two layers of two rows and two heads: 18 slots of 32 float32 and a position, and a length a head; two positions.
    by_hand = 2 * 2 * 2 * (18 * (32 * 4 + 4) + 4) + 2 * 4
    assert stats.cache_bytes == kvjax.cache_bytes(result.cache) == by_hand
    # Keys and values of 22 tokens in both rows.
    assert stats.full_cache_bytes == 2 * (2 * 2 * 22 * 2 * 16) * 4
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == pytest.approx(16 / stats.decode_seconds)


def test_a_streams_bytes_do_not_grow(model):
    sizes = {
        kvjax.cache_bytes(kvjax.prefill(model, prompt, policy=POLICIES["streaming_llm"](10), max_new_tokens=new)[1])
        for prompt, new in ((SHORT, NEW), (LONG, NEW), (LONG, 1000))
    }
    assert sizes == {2 * 2 * (10 * (32 * 4 + 4) + 4) + 4}


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_a_bfloat16_cache_takes_half_the_bytes(model, dtype):
    half = run(model, LONG, cache_dtype=dtype)
    assert {leaf.dtype for layer in half.cache.layers for leaf in jax.tree.leaves(layer.kv)} == {jnp.dtype("bfloat16")}
    # Rows are halved, positions are not.
    assert half.stats.cache_bytes == 2 * 2 * (24 * (32 * 2 + 4) + 4) + 4
    assert half.stats.full_cache_bytes * 2 == run(model, LONG).stats.full_cache_bytes
    assert np.isin(half.tokens, np.arange(512)).all()


def test_a_bfloat16_cache_changes_little(model):
    def logits(cache_dtype):
        prompts = [SHORT, LONG]
        _, cache = kvjax.prefill(model, prompts, policy=kvjax.Full(), max_new_tokens=NEW, cache_dtype=cache_dtype)
        assert cache.specs[0].dtype == cache_dtype
        return kvjax.decode(model, cache, [7, 7])[0]

    difference = np.abs(logits("bfloat16") - logits("float32")).max()
    assert 0 < difference < 0.1


# --- prompts longer than the model was trained for ---


@pytest.fixture(scope="module")
def short_sighted(model):
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


# --- what cannot be ---

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
        ({"policy": kvjax.SnapKV}, r"`policy` must be a policy such as `SnapKV\(...\)`, .* got the class SnapKV"),
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
        ({"stop_strings": ["x", ""], "tokenizer": Words()}, r"`stop_strings` must not be empty"),
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
