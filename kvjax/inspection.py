"""What a policy kept, and how much of the attention to come it holds.

B batch, T tokens, L layers, N query heads, K KV heads, D head dim, n tokens of one row.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attention import Asked
from kvjax.flattening import flatten
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy, last_queries
from kvjax.prompts import batch_of, check_policy, token_rows
from kvjax.sampling import is_integer
from kvjax.state import EMPTY, Cache
from kvjax.statistics import kept_positions
from kvjax.steps import prefill_batch
from kvjax.tokenizing import Tokenizer, check_tokenizer
from kvjax_kernels import pooled_attention, prefill_attention

#: Queries that are scored at once; bounds the memory, which is that of so many rows of attention.
_BLOCK = 128


class AttentionMass(NamedTuple):
    """How much of some queries' attention to a context is held by a cache that does not know these queries.

    Attributes:
        kept: [L, B, K], the share that the kept tokens get of the attention to all the context's tokens, summed over
            queries and the query heads of a KV head; in [0, 1].
        oracle: [L, B, K], the highest share that any choice of as many tokens could have got.
    """

    kept: np.ndarray
    oracle: np.ndarray

    @property
    def of_oracle(self) -> np.ndarray:
        """[L, B, K], `kept` as a share of `oracle`: 1 is the best that the budget allows."""
        return self.kept / np.maximum(self.oracle, np.finfo(self.oracle.dtype).tiny)


class TokenRetention(NamedTuple):
    """A token of a row, and how many heads keep it.

    Attributes:
        position: in the row.
        token: its id.
        text: its text; of a character that takes several tokens, the last has the text.
        heads: KV heads that keep it, of the L K that there are.
    """

    position: int
    token: int
    text: str
    heads: int


def attention_mass(params: Model, tokens: object, *, policy: Policy, queries: int = 32) -> AttentionMass:
    """Judges a policy by the attention of tokens that it has not seen.

    Each row is split: its last `queries` tokens are what comes later, such as a question or an answer, and all
    before them is the context, which the policy compresses as a prompt. The attention is the full model's, run over
    the whole row; only what goes to the context counts, for later tokens are in every cache. The oracle takes, for
    each head alone, as many tokens as the policy kept there: those that get the most of this very attention.

    Args:
        params: the model.
        tokens: ids [n] or [B, n], or a list of rows of different lengths.
        policy: which tokens of the context stay. Tokens that it would evict while decoding do not matter here.
        queries: tokens at the end of each row that are held out.

    Raises:
        ValueError: a row without a context, or other arguments that cannot be; see the message.
    """
    model, policy = check_model(params), check_policy(policy)
    if not is_integer(queries):
        raise ValueError(f"`queries` must be an integer, got {queries!r}.")
    rows = token_rows(tokens, model=model.spec, argument="tokens")
    shortest = min(len(row) for row in rows)
    if not 1 <= queries < shortest:
        raise ValueError(
            f"`queries` must be at least 1 and leave at least one token of context, "
            f"got {queries} for a row of {shortest} tokens."
        )
    contexts = [row[: -int(queries)] for row in rows]
    # Nothing is decoded; one shape for all numbers of queries.
    _, cache, _ = prefill_batch(model, batch_of(contexts), policy=policy, room=1)
    batch = batch_of(rows)
    leaves, structure = flatten(model)
    received = _received(leaves, batch.tokens, batch.lengths, structure=structure, queries=int(queries))
    pairs = [
        [
            [_shares(attention[: len(context)], kept) for attention, kept in zip(heads, kept_by_head, strict=True)]
            for context, heads, kept_by_head in zip(contexts, np.asarray(layer), kept_by_row, strict=True)
        ]
        for layer, kept_by_row in zip(received, kept_positions(cache), strict=True)
    ]
    shares = np.asarray(pairs, np.float64)
    return AttentionMass(kept=shares[..., 0], oracle=shares[..., 1])


def kept_mask(cache: Cache, *, row: int = 0) -> np.ndarray:
    """Which tokens of a row each head holds: bool [L, K, n], n the tokens that the row has seen.

    Raises:
        ValueError: the cache has no such row.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` must be a kvjax.Cache, got {type(cache).__name__}.")
    rows = cache.next_position.shape[0]
    if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < rows:
        raise ValueError(f"`row` must be one of the cache's {rows}, 0 to {rows - 1}, got {row!r}.")
    seen = int(cache.next_position[row])
    mask = np.zeros((len(cache.layers), cache.model.num_kv_heads, seen), bool)
    for layer, kept_by_row in enumerate(kept_positions(cache)):
        for head, positions in enumerate(kept_by_row[row]):
            mask[layer, head, positions] = True
    return mask


def retention_table(cache: Cache, tokens: object, tokenizer: Tokenizer, *, row: int = 0) -> list[TokenRetention]:
    """All tokens of a row as text, each with the number of heads that keep it.

    Args:
        cache: what is kept.
        tokens: ids [n] that the row has seen, all of them.
        tokenizer: gives their text.
        row: of the cache.

    Raises:
        ValueError: the cache has no such row, or has seen another number of tokens.
    """
    heads = kept_mask(cache, row=row).sum((0, 1))
    ids = np.asarray(tokens)
    if ids.shape != heads.shape:
        raise ValueError(f"`tokens` must be the {len(heads)} ids that row {row} has seen, got shape {ids.shape}.")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"`tokens` must be integers, got {ids.dtype}.")
    if check_tokenizer(tokenizer) is None:
        raise ValueError("`tokenizer` must give the tokens' texts, got None.")
    texts = token_texts(ids.tolist(), tokenizer)
    return [TokenRetention(*entry) for entry in zip(range(len(ids)), ids.tolist(), texts, heads.tolist(), strict=True)]


def token_texts(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The piece of text that each token adds, special tokens included; joined they are the whole text."""
    texts, context, shown = [], 0, 0
    for end in range(1, len(tokens) + 1):
        # Some tokenizers write a token's space only after another token, so a piece is a difference of two texts.
        before = tokenizer.decode(tokens[context:shown], skip_special_tokens=False)
        after = tokenizer.decode(tokens[context:end], skip_special_tokens=False)
        complete = end == len(tokens) or not after.endswith("\N{REPLACEMENT CHARACTER}")
        texts.append(after[len(before) :] if complete else "")
        if complete:
            context, shown = shown, end
    return texts


def _shares(attention: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
    """Shares of one head's attention [n] that the kept positions have, and that as many of the best have."""
    attention = attention.astype(np.float64)
    total = attention.sum()
    if total == 0.0:  # The queries look at nothing but themselves: nothing is lost.
        return 1.0, 1.0
    share = min(attention[kept].sum() / total, 1.0)
    best = np.sort(attention)[::-1][: len(kept)].sum() / total
    # The two sums may add equal tokens in a different order.
    return share, min(max(best, share), 1.0)


@functools.partial(jax.jit, static_argnames=("structure", "queries"))
def _received(
    leaves: list[jax.Array], tokens: jax.Array, lengths: jax.Array, *, structure: Any, queries: int
) -> list[jax.Array]:
    """For each layer, the attention [B, K, T] that each row's last `queries` tokens pay, with the full model."""
    model: Model = jax.tree.unflatten(structure, leaves)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(offset < lengths[:, None], offset, EMPTY)
    received: dict[int, jax.Array] = {}

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        rope = model.spec.rope
        asked = Asked(rope.rotate(query, positions), query, positions, None, rope)
        key = rope.rotate(key, positions)
        received[layer] = _summed_attention(*last_queries(asked, queries), key, positions)
        output, _ = prefill_attention(asked.query, key, value)
        return output

    model(tokens, attend)
    return [received[layer] for layer in range(model.spec.num_layers)]


def _summed_attention(
    query: Float[Array, "B W N D"],
    query_positions: Int[Array, "B W"],
    key: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B K T"]:
    """The attention that each token gets, summed over queries and the query heads of each KV head."""
    batch, length, kv_heads, _ = key.shape
    # Values take no part in it.
    kv = jnp.concatenate([key, jnp.zeros_like(key)], axis=-1).swapaxes(1, 2)
    key_positions = jnp.broadcast_to(positions[:, None], (batch, kv_heads, length))
    total = jnp.zeros((batch, kv_heads, length), jnp.float32)
    for start in range(0, query.shape[1], _BLOCK):
        block = query_positions[:, start : start + _BLOCK]
        # Every query exists, because every row is longer: a mean over queries and heads is a sum over so many.
        mean = pooled_attention(query[:, start : start + _BLOCK], kv, block, key_positions)
        total = total + mean * (block.shape[1] * query.shape[2] // kv_heads)
    return total
