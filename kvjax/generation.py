"""`generate`: a prompt in, an answer out, with whatever cache the policy keeps."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.implementation import Ran, check_implementation
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.policies.full import Full
from kvjax.prompts import Batch, Tokenizer, batch_of, check_new_tokens, check_policy, token_rows
from kvjax.sampling import Sampling, SamplingArrays, choose, row_keys
from kvjax.state import Cache
from kvjax.statistics import Stats, cache_bytes, full_cache_bytes, kept_tokens
from kvjax.steps import check_cache, decode_step, dtype_name, extend_batch, prefill_batch
from kvjax.text import TextStream
from kvjax_kernels.dispatch import record

FinishReason = Literal["stop", "length"]


class NewToken(NamedTuple):
    """What a streaming callback gets at every step.

    Attributes:
        tokens: [B] ids; -1 in rows that have ended.
        texts: for each row, the text that can be shown because of it; None without a tokenizer.
    """

    tokens: np.ndarray
    texts: list[str] | None


class Result(NamedTuple):
    """An answer.

    Attributes:
        tokens: [B, max_new_tokens] int32 ids, a stop token included; 0 right of a row's length.
        lengths: [B] int32.
        texts: the answers without special tokens and stop strings; None without a tokenizer.
        finish_reasons: for each row "stop" (a stop token or string) or "length" (`max_new_tokens`).
        cache: holds the prompt and every returned token, as far as the policy keeps them: give it to `generate` or
            `extend` to go on.
        stats: tokens, bytes and seconds.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    texts: list[str] | None
    finish_reasons: list[FinishReason]
    cache: Cache
    stats: Stats


class _Progress(NamedTuple):
    """What the compiled loop carries.

    Attributes:
        cache: of all tokens so far.
        logits: of the next token.
        tokens: the answers so far.
        counts: their lengths.
        active: rows that go on.
    """

    cache: Cache
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B M"]
    counts: Int[Array, "B"]
    active: Bool[Array, "B"]


def generate(
    params: Model,
    prompt: object,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_tokens: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    callback: Callable[[NewToken], None] | None = None,
    cache: Cache | None = None,
    cache_dtype: object = None,
    implementation: str | Mapping[str, str] | None = None,
) -> Result:
    """Answers a prompt, or a batch of them, with a compressed cache.

    Without a callback and stop strings all tokens are decoded in one compiled loop; with them the host looks at
    every token. Rows of different lengths give what each gives alone.

    Args:
        params: the model, for example `kvjax_models.load(...).params`.
        prompt: ids [n] or [B, n], a list of rows of different lengths, and with a tokenizer a text, a list of texts,
            a chat (list of {"role": ..., "content": ...}) or a list of chats.
        policy: which tokens stay in the cache; all by default.
        max_new_tokens: the longest answer.
        tokenizer: for texts and chats.
        temperature: 0 takes the best token each time.
        top_k: draw from so many of the best tokens.
        top_p: draw from the best tokens that together have this probability.
        min_p: draw from tokens with at least this share of the best one's probability.
        seed: row b draws with seed + b; or a seed for each row.
        stop_tokens: ids that end an answer; the model's own by default, () for none.
        stop_strings: texts that end an answer.
        callback: gets a `NewToken` at every step.
        cache: of an earlier result: the prompt continues it.
        cache_dtype: of cached keys and values, float32 or bfloat16; the model's by default.
        implementation: which kernels run, one name for all operations or a name for some of them
            (`kvjax.implementation.OPERATIONS`): "tpu", "gpu", "xla", "reference", "tpu-interpret", "gpu-interpret".
            By default the platform's kernels where they can do what is asked, else "xla"; `stats.implementations`
            tells. A `cache` goes on with its own unless one is named.

    Raises:
        ValueError: arguments that cannot be; see the message.
        NotImplementedError: a named implementation that cannot do this.
    """
    model = check_model(params)
    room = check_new_tokens(max_new_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).arrays()
    stops = _stop_tokens(stop_tokens, model)
    stop_texts = _stop_strings(stop_strings, tokenizer)
    policy = _policy(policy, cache, model, cache_dtype)
    forced = check_implementation(implementation)
    batch = batch_of(token_rows(prompt, model=model.spec, tokenizer=tokenizer))
    rows = len(batch.lengths)
    keys = row_keys(seed, rows)

    started = time.perf_counter()
    if cache is None:
        logits, cache, ran = prefill_batch(
            model, batch, policy=policy, room=room, cache_dtype=cache_dtype, implementation=forced
        )
    else:
        logits, cache, ran = extend_batch(model, cache if forced is None else cache.using(forced), batch, room=room)
    logits.block_until_ready()
    prefilled = time.perf_counter()

    progress = _Progress(
        cache=cache,
        logits=logits,
        tokens=jnp.zeros((rows, room), jnp.int32),
        counts=jnp.zeros(rows, jnp.int32),
        active=jnp.ones(rows, bool),
    )
    leaves, structure = jax.tree.flatten(model)
    advance = functools.partial(_decode_loop, leaves, structure=structure, stops=stops, keys=keys, sampling=sampling)
    streams = None if tokenizer is None else [TextStream(tokenizer, stop_texts) for _ in range(rows)]
    if callback is None and not stop_texts:
        progress, decoding = advance(progress, steps=room)
    else:
        progress, decoding = _watch(progress, advance, streams, callback)
    progress.counts.block_until_ready()
    decoded = time.perf_counter()

    lengths = np.asarray(progress.counts)
    answers = [row[:length] for row, length in zip(np.asarray(progress.tokens), lengths, strict=True)]
    stopped = [stream.stopped for stream in streams] if streams is not None else [False] * rows
    return Result(
        tokens=np.asarray(progress.tokens),
        lengths=lengths,
        texts=_texts(answers, streams if stop_texts else None, tokenizer),
        finish_reasons=[
            "stop" if s or a[-1] in np.asarray(stops) else "length" for a, s in zip(answers, stopped, strict=True)
        ],
        cache=progress.cache,
        stats=_stats(
            progress,
            batch,
            room,
            implementations=dict(ran.operations + decoding.operations),
            prefill_seconds=prefilled - started,
            decode_seconds=decoded - prefilled,
        ),
    )


def _texts(
    answers: list[np.ndarray], streams: list[TextStream] | None, tokenizer: Tokenizer | None
) -> list[str] | None:
    """The answers as text; those of the streams where there are any, since a stop string cuts them."""
    if tokenizer is None:
        return None
    if streams is not None:
        return [stream.text for stream in streams]
    return [tokenizer.decode(answer.tolist(), skip_special_tokens=True) for answer in answers]


def _stats(progress: _Progress, batch: Batch, room: int, **measured: Any) -> Stats:
    cache, lengths = progress.cache, np.asarray(progress.counts)
    seen = np.asarray(cache.next_position)
    return Stats(
        prompt_tokens=tuple(batch.lengths.tolist()),
        new_tokens=tuple(lengths.tolist()),
        kept_tokens=kept_tokens(cache),
        seen_tokens=float(seen.mean()),
        cache_bytes=cache_bytes(cache),
        full_cache_bytes=full_cache_bytes(cache, int((seen - lengths).max()) + room),
        **measured,
    )


def _stop_strings(stop_strings: str | Sequence[str], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    texts = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if texts and tokenizer is None:
        raise ValueError("`stop_strings` need a `tokenizer`.")
    if any(not text for text in texts):
        raise ValueError("`stop_strings` must not be empty.")
    return texts


def _policy(policy: Policy | None, cache: Cache | None, model: Model, cache_dtype: object) -> Policy:
    if cache is None:
        return Full() if policy is None else check_policy(policy)
    check_cache(model, cache)
    if policy is not None and check_policy(policy) != cache.policy:
        raise ValueError(f"`policy` must be the one of the `cache`, {cache.policy}, or None; got {policy}.")
    if cache_dtype is not None and dtype_name(cache_dtype) != cache.specs[0].dtype:
        raise ValueError(f"`cache_dtype` must be the one of the `cache`, {cache.specs[0].dtype}; got {cache_dtype}.")
    return cache.policy


def _stop_tokens(stop_tokens: int | Sequence[int] | None, model: Model) -> jax.Array:
    ids = np.asarray(model.spec.stop_tokens if stop_tokens is None else stop_tokens).reshape(-1)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"`stop_tokens` must be integers, got {stop_tokens!r}.")
    for token in ids.tolist():
        if not 0 <= token < model.spec.vocab_size:
            raise ValueError(f"`stop_tokens` must be from 0 to {model.spec.vocab_size - 1}, got {token}.")
    return jnp.asarray(ids, jnp.int32)


def _watch(
    progress: _Progress,
    advance: Callable[..., tuple[_Progress, Ran]],
    streams: list[TextStream] | None,
    callback: Callable[[NewToken], None] | None,
) -> tuple[_Progress, Ran]:
    """Decodes with the host looking at every token."""
    active, ran = np.asarray(progress.active), Ran(())
    for step in range(progress.tokens.shape[1]):
        before = active
        progress, ran = advance(progress, steps=1)
        # A row that was active has one more token, at this step's place.
        tokens = np.where(before, np.asarray(progress.tokens[:, step]), -1)
        active = np.asarray(progress.active)
        pieces = None
        if streams is not None:
            pieces = [
                stream.add(int(token)) if token >= 0 else "" for stream, token in zip(streams, tokens, strict=True)
            ]
            halted = np.asarray([stream.stopped for stream in streams], bool)
            if (active & halted).any():
                active = active & ~halted
                progress = progress._replace(active=jnp.asarray(active))
            ended = before & ~active if step + 1 < progress.tokens.shape[1] else before
            for row in np.flatnonzero(ended):
                pieces[row] += streams[row].finish()
        if callback is not None:
            callback(NewToken(tokens, pieces))
        if not active.any():
            break
    return progress, ran


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="progress")
def _decode_loop(
    leaves: list[jax.Array],
    progress: _Progress,
    *,
    structure: Any,
    stops: jax.Array,
    keys: jax.Array,
    sampling: SamplingArrays | None,
    steps: int | jax.Array,
) -> tuple[_Progress, Ran]:
    """Up to `steps` tokens for every active row, and what runs."""
    model: Model = jax.tree.unflatten(structure, leaves)
    longest = progress.tokens.shape[1]
    row = jnp.arange(progress.tokens.shape[0])

    def goes_on(carry: tuple[jax.Array, _Progress]) -> jax.Array:
        step, now = carry
        return (step < steps) & now.active.any()

    def body(carry: tuple[jax.Array, _Progress]) -> tuple[jax.Array, _Progress]:
        step, now = carry
        token = choose(now.logits, keys, now.counts, sampling)
        place = jnp.where(now.active, now.counts, longest + row)
        tokens = now.tokens.at[row, place].set(token, mode="drop", unique_indices=True)
        counts = now.counts + now.active.astype(jnp.int32)
        # The last token goes through the model too, so that the cache holds all that is returned.
        logits, cache = decode_step(model, now.cache, jnp.where(now.active, token, -1))
        ended = (token[:, None] == stops[None]).any(-1) | (counts >= longest)
        return step + 1, _Progress(cache, logits, tokens, counts, now.active & ~ended)

    with record() as ran:
        _, progress = jax.lax.while_loop(goes_on, body, (jnp.zeros((), jnp.int32), progress))
    return progress, Ran.of(ran)
