"""Models that are made in a test, and a tokenizer of whole words for them."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.rope import Rope, no_rope


class Words:
    """Words, single digits and signs are the tokens; ids are given out as they come."""

    chat_template = None

    def __init__(self, size: int):
        self.size = size
        self.ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        words = re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]", text)
        ids = [self.ids.setdefault(word, len(self.ids)) for word in words]
        assert len(self.ids) <= self.size
        return ids

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        words = list(self.ids)
        return " ".join(words[token] for token in ids)


@pytest.fixture
def words() -> Words:
    return Words(256)


@pytest.fixture(scope="session")
def haystack() -> str:
    """Plain sentences of few words, so that a small vocabulary holds them."""
    people, places = ("Anna", "Ben", "Carl", "Dora"), ("home", "town", "sea", "hills")
    verbs = ("walks", "runs", "rides", "sails", "drives")
    return " ".join(f"{who} {verb} to {where}." for who in people for verb in verbs for where in places)


class PlainLayer(NamedTuple):
    """Attention and a tanh, without norms: it computes in whatever type its arrays have."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    inner: jax.Array

    def __call__(self, layer, x, attend):
        heads = (jnp.einsum("bth,hnd->btnd", x, weight) for weight in (self.query, self.key, self.value))
        x = x + jnp.einsum("btnd,ndh->bth", attend(layer, *heads), self.output)
        return x + jnp.tanh(x @ self.inner)


@jax.tree_util.register_pytree_node_class
class PlainModel:
    """A model of plain layers, to which `kvjax.duo` is to be no less than to a Llama."""

    def __init__(self, spec, embedding, layers):
        self.spec, self.embedding, self.layers = spec, embedding, layers

    @property
    def norm(self):
        return _Identity()

    def embed(self, tokens):
        return self.embedding[tokens]

    def __call__(self, tokens, attend):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend)
        return x

    def logits(self, hidden):
        return (hidden @ self.embedding.T).astype(jnp.float32)

    def tree_flatten(self):
        return (self.embedding, self.layers), self.spec

    @classmethod
    def tree_unflatten(cls, spec, children):
        return cls(spec, *children)


@jax.tree_util.register_pytree_node_class
class _Identity:
    def __call__(self, x):
        return x

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, static, children):
        del static, children
        return cls()


def spec_of(layers, query_heads, kv_heads, head_dim, *, vocab, dtype, rope, positions=4096):
    return kvjax.ModelSpec(
        num_layers=layers,
        num_query_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=positions,
        dtype=dtype,
        rope=rope,
    )


def make_plain_model(dtype: str) -> PlainModel:
    rng = np.random.default_rng(5)
    hidden, query_heads, kv_heads, head_dim, vocab = 12, 4, 2, 6, 256

    def weight(*shape):
        return jnp.asarray(rng.standard_normal(shape) * hidden**-0.5, dtype)

    layers = [
        PlainLayer(
            4 * weight(hidden, query_heads, head_dim),
            weight(hidden, kv_heads, head_dim),
            weight(hidden, kv_heads, head_dim),
            weight(query_heads, head_dim, hidden),
            weight(hidden, hidden),
        )
        for _ in range(3)
    ]
    spec = spec_of(3, query_heads, kv_heads, head_dim, vocab=vocab, dtype=dtype, rope=no_rope())
    return PlainModel(spec, 4 * weight(vocab, hidden), layers)


@pytest.fixture(scope="session")
def make_plain():
    """Builds a random model of three layers, four query and two KV heads: `make_plain(dtype)`."""
    return make_plain_model


@pytest.fixture(scope="session")
def copying_model():
    """Two layers of two KV heads; only the first head of the second layer must see far back.

    Its query is the code of the present token, its key that of the token before each one, and its value that of the
    token itself: it finds where the present token stood before, and tells what came after it. The first layer's
    heads look one token and three tokens back, by rotation alone; the second layer's other head two.
    """
    code, head_dim, vocab = 18, 32, 256
    rope = Rope(head_dim=head_dim, theta=1e9)
    rng = np.random.default_rng(7)
    codes = rng.choice([-1.0, 1.0], (vocab, code)) / np.sqrt(code)
    # Places in the hidden state: the token's code, a constant, the code of the token before, what the heads find.
    token, constant = np.arange(code), code
    before, others, found = (np.arange(code) + code + 1 + code * place for place in range(3))
    hidden = code + 1 + 3 * code
    embedding = np.zeros((vocab, hidden))
    embedding[:, token], embedding[:, constant] = codes, 1.0
    # Pairs i and i + 16 turn by theta^(-i / 16): the last nine of them hardly turn in a thousand tokens.
    still = np.concatenate([np.arange(7, 16), np.arange(23, 32)])

    def looking_back(by):
        """Query and key of a head that attends to the token `by` places back."""
        query, key = (np.zeros((hidden, head_dim)) for _ in range(2))
        angle = -by * rope.frequencies()
        query[constant] = 30 * np.concatenate([np.cos(angle), np.sin(angle)])
        key[constant, :16] = 1.0
        return query, key

    def moved(source, target):
        """Value and output that copy a code from one place of the hidden state to another."""
        value, output = np.zeros((hidden, head_dim)), np.zeros((head_dim, hidden))
        value[source, still], output[still, target] = 1.0, 1.0
        return value, output

    matching = np.zeros((2, hidden, head_dim))
    matching[0, token, still], matching[1, before, still] = 300.0, 1.0
    heads = [
        [(*looking_back(1), *moved(token, before)), (*looking_back(3), *moved(token, others))],
        [(*matching, *moved(token, found)), (*looking_back(2), *moved(token, others))],
    ]
    layers = []
    for layer in heads:
        query, key, value, output = (np.stack(part) for part in zip(*layer, strict=True))
        query, key, value = (jnp.asarray(x.swapaxes(0, 1), jnp.float32) for x in (query, key, value))
        nothing = jnp.zeros((hidden, hidden), jnp.float32)
        layers.append(PlainLayer(query, key, value, jnp.asarray(output, jnp.float32), nothing))
    spec = spec_of(2, 2, 2, head_dim, vocab=vocab, dtype="float32", rope=rope)
    return PlainModel(spec, jnp.asarray(embedding, jnp.float32), layers)
