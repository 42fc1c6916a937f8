"""What a policy keeps, and how much of later attention it holds."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import needle
from kvjax.inspection import _summed_attention, attention_mass, kept_mask, retention_table, token_texts
from kvjax.plots import retention_map, short_name

QUERIES = 8
POLICIES = [
    kvjax.StreamingLLM(budget=16),
    kvjax.SnapKV(budget=16, window=4),
    kvjax.AdaKV(budget=16, window=4),
    kvjax.H2O(budget=16),
]


@pytest.fixture(scope="module")
def rows(tiny):
    """Two rows of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(0, tiny.spec.vocab_size, length) for length in (61, 43)]


@pytest.fixture(scope="module")
def dense(tiny, rows):
    """For each row and layer, the probabilities [N, n, n]."""
    return [dense_attention(tiny, tokens) for tokens in rows]


def dense_attention(model, tokens):
    """The probabilities [N, n, n] of every layer, all at once, in NumPy."""
    layers = {}
    count = len(tokens)
    positions = jnp.arange(count, dtype=jnp.int32)[None]

    def attend(layer, query, key, value):
        query, key = (np.asarray(model.spec.rope.rotate(x, positions), np.float64)[0] for x in (query, key))
        group = query.shape[1] // key.shape[1]
        key, values = (np.repeat(x, group, axis=1) for x in (key, np.asarray(value, np.float64)[0]))
        scores = np.einsum("qnd,snd->nqs", query, key) / np.sqrt(query.shape[-1])
        scores[:, ~np.tri(count, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        layers[layer] = weights / weights.sum(-1, keepdims=True)
        return jnp.asarray(np.einsum("nqs,snd->qnd", layers[layer], values)[None], jnp.float32)

    model(jnp.asarray(tokens[None], jnp.int32), attend)
    return [layers[layer] for layer in range(model.spec.num_layers)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_kept_and_oracle_mass_are_those_of_dense_attention(policy, tiny, rows, dense):
    mass = attention_mass(tiny, rows, policy=policy, queries=QUERIES)
    _, cache = kvjax.prefill(tiny, [row[:-QUERIES] for row in rows], policy=policy, max_new_tokens=1)
    kept = kvjax.kept_positions(cache)
    for row, tokens in enumerate(rows):
        for layer, probabilities in enumerate(dense[row]):
            by_head = probabilities.reshape(tiny.spec.num_kv_heads, -1, len(tokens), len(tokens)).sum(1)
            for head, attention in enumerate(by_head[:, -QUERIES:, :-QUERIES].sum(1)):
                held = kept[layer][row][head]
                best = np.sort(attention)[-len(held) :].sum()
                where = layer, row, head
                np.testing.assert_allclose(mass.kept[where], attention[held].sum() / attention.sum(), atol=1e-5)
                np.testing.assert_allclose(mass.oracle[where], best / attention.sum(), atol=1e-5)
    assert (mass.kept >= 0).all()
    assert (mass.oracle >= mass.kept).all()
    assert (mass.oracle <= 1).all()
    assert (mass.of_oracle <= 1).all()


def test_the_full_cache_holds_all_attention(tiny, rows):
    mass = attention_mass(tiny, rows, policy=kvjax.Full(), queries=QUERIES)
    assert mass.kept.shape == (tiny.spec.num_layers, len(rows), tiny.spec.num_kv_heads)
    assert (mass.kept == 1).all()
    assert (mass.oracle == 1).all()


def test_queries_of_several_blocks_are_all_counted(monkeypatch):
    query, key = (jax.random.normal(jax.random.key(seed), (2, 21, heads, 8)) for seed, heads in ((0, 4), (1, 2)))
    positions = jnp.broadcast_to(jnp.arange(21), (2, 21))
    whole = _summed_attention(query, positions, key, positions)
    np.testing.assert_allclose(whole.sum(-1), 42, rtol=1e-5)
    monkeypatch.setattr("kvjax.inspection._BLOCK", 5)
    np.testing.assert_allclose(_summed_attention(query, positions, key, positions), whole, atol=1e-5)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (0, "`queries` must be at least 1 .* got 0 for a row of 43 tokens"),
        (43, "`queries` must be at least 1 and leave at least one token of context, got 43 for a row of 43 tokens"),
        (2.5, "`queries` must be an integer, got 2.5"),
    ],
)
def test_every_row_needs_a_context(queries, message, tiny, rows):
    with pytest.raises(ValueError, match=message):
        attention_mass(tiny, rows, policy=kvjax.Full(), queries=queries)


@pytest.mark.smollm2
def test_snapkv_holds_more_of_an_answers_attention_than_streaming_llm(smollm2):
    hidden = needle(smollm2.tokenizer, tokens=600, seed=1)
    text = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": hidden.prompt}])
    tokens = smollm2.tokenizer.encode(f"{text}{hidden.answer}.", add_special_tokens=False)
    snapkv, streaming = (
        attention_mass(smollm2.params, tokens, policy=policy, queries=7)
        for policy in (kvjax.SnapKV(budget=128), kvjax.StreamingLLM(budget=128))
    )
    print(f"of the oracle: SnapKV {snapkv.of_oracle.mean():.3f}, StreamingLLM {streaming.of_oracle.mean():.3f}")
    # Both choose as many tokens, so both have one oracle.
    np.testing.assert_array_equal(snapkv.oracle, np.maximum(streaming.oracle, snapkv.oracle))
    assert snapkv.kept.mean() > streaming.kept.mean() + 0.1


@pytest.fixture(scope="module")
def cache(tiny, rows):
    """Of both rows, by a policy whose heads hold unequal numbers of tokens."""
    _, cache = kvjax.prefill(tiny, rows, policy=kvjax.AdaKV(budget=16, window=4), max_new_tokens=3)
    return cache


def test_the_mask_has_the_kept_positions(cache, rows):
    for row, tokens in enumerate(rows):
        mask = kept_mask(cache, row=row)
        assert mask.shape[2] == len(tokens)
        for layer, kept in enumerate(kvjax.kept_positions(cache)):
            for head, positions in enumerate(kept[row]):
                np.testing.assert_array_equal(np.flatnonzero(mask[layer, head]), positions)


class Numbers:
    """A tokenizer whose every token is the text of its id."""

    def encode(self, text, /, *, add_special_tokens=True):
        del add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, ids, /, *, skip_special_tokens=False):
        assert not skip_special_tokens
        return "".join(f" {token}" for token in ids)


def test_the_table_counts_the_heads_that_keep_each_token(cache, rows):
    table = retention_table(cache, rows[1], Numbers(), row=1)
    assert [entry.position for entry in table] == list(range(len(rows[1])))
    assert [entry.text for entry in table] == [f" {token}" for token in rows[1]]
    assert sum(entry.heads for entry in table) == sum(
        len(kept) for layer in kvjax.kept_positions(cache) for kept in layer[1]
    )
    # The window is kept by all.
    assert {entry.heads for entry in table[-4:]} == {8}


def test_tokens_and_row_must_be_the_caches(cache, rows):
    with pytest.raises(ValueError, match=r"`tokens` must be the 61 ids that row 0 has seen, got shape \(43,\)"):
        retention_table(cache, rows[1], Numbers())
    with pytest.raises(ValueError, match="`row` must be one of the cache's 2, 0 to 1, got 2"):
        kept_mask(cache, row=2)


@pytest.mark.smollm2
def test_texts_of_tokens_are_the_text_even_of_split_characters(smollm2):
    text = "<|im_start|>user\nÉté 🙂, naïve  日本語.<|im_end|>\n"
    tokens = smollm2.tokenizer.encode(text, add_special_tokens=False)
    texts = token_texts(tokens, smollm2.tokenizer)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text
    assert "🙂" in "".join(piece for piece in texts if "\N{REPLACEMENT CHARACTER}" not in piece)


def test_the_map_shows_what_is_kept(cache, rows, tmp_path):
    figure = retention_map(cache, row=1, marks={"here": (3, 5)})
    middle, top, right = figure.axes
    np.testing.assert_array_equal(middle.images[0].get_array(), kept_mask(cache, row=1).reshape(8, -1))
    assert (middle.get_xlabel(), right.get_xlabel()) == ("position in the row (token)", "of the row\nin each head")
    assert [text.get_text() for text in top.texts] == ["here"]
    title = figure.get_suptitle()
    assert title.startswith("AdaKV(budget=16, window=4)\nholds ")
    assert f" of {len(rows[1])} tokens in " in title
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    assert "matplotlib.pyplot" not in sys.modules


def test_a_long_row_is_binned(tiny):
    tokens = np.random.default_rng(2).integers(0, tiny.spec.vocab_size, 1100)
    _, long = kvjax.prefill(tiny, tokens, policy=kvjax.StreamingLLM(budget=100, sinks=4), max_new_tokens=1)
    figure = retention_map(long)
    shares = np.asarray(figure.axes[0].images[0].get_array())
    assert shares.shape == (8, 900)
    # Bins of one or two tokens.
    assert (shares[:, :3] == 1).all()
    assert (shares[:, -70:] == 1).all()
    assert (shares[:, 4:810] == 0).all()
    assert figure.axes[3].get_ylabel() == "share held of each bin of 1.2 tokens"


def test_a_plot_without_matplotlib_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'a plot needs `pip install "kvjax\[plot\]"`'):
        retention_map(cache)


def test_a_policys_short_name_has_what_is_not_its_default():
    assert short_name(kvjax.Full()) == "Full()"
    assert short_name(kvjax.SnapKV(budget=64)) == "SnapKV(budget=64)"
    assert short_name(kvjax.SnapKV(budget=0.5, pooling="avg")) == "SnapKV(budget=0.5, pooling='avg')"
