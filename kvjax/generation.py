"""`generate`: a prompt in, an answer out, with whatever cache the policy keeps."""

import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.compiling import Compilation
from kvjax.decoding import NewToken, Progress, decode_all, decode_loop, decode_watched
from kvjax.flattening import flatten
from kvjax.implementation import Ran
from kvjax.model import Model
from kvjax.policies.base import Policy
from kvjax.prompts import (
    PACKAGE,
    NonFiniteWarning,
)
from kvjax.question import Question, question
from kvjax.sampling import Sampling
from kvjax.state import Cache, Known
from kvjax.statistics import Stats, stats_of
from kvjax.steps import extend_batch, prefill_batch
from kvjax.text import TextStream
from kvjax.tokenizing import Tokenizer

FinishReason = Literal["stop", "length", "nonfinite"]


class Result(NamedTuple):
    """An answer.

    Attributes:
        tokens: [B, max_new_tokens] int32 ids, a stop token included; 0 right of a row's length.
        lengths: [B] int32.
        texts: the answers without special tokens and stop strings; None without a tokenizer.
        finish_reasons: for each row "stop" (a stop token or string), "length" (`max_new_tokens`), or "nonfinite" (the
            scores of its next token are NaN or infinite, as broken weights give).
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

    @property
    def text(self) -> str:
        """The answer of the only row.

        Raises:
            ValueError: there are several rows, or there was no tokenizer.
        """
        if self.texts is None or len(self.texts) != 1:
            raise ValueError("`text` is that of one row that a `tokenizer` decoded; see `texts` and `tokens`.")
        return self.texts[0]


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
    seed: int | Sequence[int] | np.ndarray | jax.Array = 0,
    stop_tokens: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    callback: Callable[[NewToken], None] | None = None,
    cache: Cache | None = None,
    cache_dtype: object = None,
    implementation: str | Mapping[str, str] | None = None,
) -> Result:
    """Answers a prompt, or a batch of them, with a compressed cache.

    Without a callback and stop strings tokens are decoded in a compiled loop, for about half a second a call, so that
    Ctrl-C takes effect; with them the host looks at every token. Rows of different lengths give what each gives
    alone. A row whose scores become NaN or infinite ends there, with a `NonFiniteWarning`.

    Args:
        params: the model, for example `kvjax_models.load(...).params`.
        prompt: ids [n] or [B, n], a list of rows of different lengths, and with a tokenizer a text, a list of texts,
            a chat (list of {"role": ..., "content": ...}) or a list of chats. What a Hugging Face tokenizer returns
            (`input_ids`, `attention_mask`) is taken too.
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
        cache: of an earlier result: the prompt continues it. A text then gets no token that begins a text, and a
            chat is the new messages only, rendered as the turn behind the answer; `kvjax.Chat` keeps track of both.
        cache_dtype: of cached keys and values, float32 or bfloat16; the model's by default.
        implementation: which kernels run, one name for all operations or a name for some of them
            (`kvjax.implementation.OPERATIONS`): "tpu", "gpu", "xla", "reference", "tpu-interpret", "gpu-interpret".
            By default the platform's kernels where they can do what is asked, else "xla"; `stats.implementations`
            tells. A `cache` goes on with its own unless one is named.

    Raises:
        ValueError: arguments that cannot be; see the message.
        NotImplementedError: a named implementation that cannot do this.
    """
    if callback is not None and not callable(callback):
        raise ValueError(f"`callback` must be a function of a `NewToken`, got {callback!r}.")
    asked = question(
        params,
        prompt,
        policy=policy,
        max_new_tokens=max_new_tokens,
        tokenizer=tokenizer,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        seed=seed,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        cache=cache,
        cache_dtype=cache_dtype,
        implementation=implementation,
    )
    return to_end(answering(asked, watched=callback is not None), callback)


def to_end(steps: Generator[NewToken, None, Result], callback: Callable[[NewToken], None] | None) -> Result:
    """Takes every step, tells a callback of it, and returns the answer."""
    while True:
        try:
            new = next(steps)
        except StopIteration as end:
            return end.value
        if callback is not None:
            callback(new)


def answering(asked: Question, *, watched: bool) -> Generator[NewToken, None, Result]:
    """Answers; yields every step where it is `watched` or there are stop strings."""
    started, compilation = time.perf_counter(), Compilation()
    with compilation:
        logits, cache, ran = _read(asked)
        logits.block_until_ready()
    prefilled = time.perf_counter()
    leaves, structure = flatten(asked.model)
    stops = jnp.asarray(asked.stops, jnp.int32)

    def advance(progress: Progress, steps: int) -> tuple[Progress, Ran]:
        with compilation:
            return decode_loop(
                leaves,
                progress,
                structure=structure,
                stops=stops,
                keys=asked.keys,
                sampling=asked.sampling,
                steps=steps,
            )

    progress = Progress.start(cache, logits, room=asked.room)
    tokenizer, rows = asked.tokenizer, len(asked.batch.lengths)
    streams = None if tokenizer is None else [TextStream(tokenizer, asked.stop_texts) for _ in range(rows)]
    if watched or asked.stop_texts:
        progress, decoding = yield from decode_watched(progress, advance, streams)
    else:
        progress, decoding = decode_all(progress, advance, alike=(cache.model, rows))
    progress.counts.block_until_ready()
    return _result(
        asked,
        progress,
        streams,
        implementations=dict(ran.operations + decoding.operations),
        prefill_seconds=prefilled - started,
        decode_seconds=time.perf_counter() - prefilled,
        compile_seconds=compilation.seconds,
    )


def _read(asked: Question) -> tuple[jax.Array, Cache, Ran]:
    """Scores of the first new token, and the cache with the prompt."""
    if asked.cache is not None:
        return extend_batch(asked.model, asked.cache, asked.batch, room=asked.room)
    return prefill_batch(
        asked.model,
        asked.batch,
        policy=asked.policy,
        room=asked.room,
        cache_dtype=asked.cache_dtype,
        implementation=asked.implementation,
    )


def _result(asked: Question, progress: Progress, streams: list[TextStream] | None, **measured: Any) -> Result:
    tokens, lengths = np.asarray(progress.tokens), np.asarray(progress.counts)
    answers = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    broken = np.asarray(progress.broken)
    _warn_of(broken, lengths)
    stopped = [stream.stopped for stream in streams] if streams is not None else [False] * len(answers)
    asked_last = asked.batch.tokens[np.arange(len(answers)), asked.batch.lengths - 1]
    last = [row[-1] if len(row) else token for row, token in zip(answers, asked_last, strict=True)]
    progress.cache.known = Known(np.asarray(last))
    return Result(
        tokens=tokens,
        lengths=lengths,
        texts=_texts(answers, streams if asked.stop_texts else None, asked.tokenizer),
        finish_reasons=[
            "nonfinite" if b else "stop" if s or (len(a) and a[-1] in asked.stops) else "length"
            for a, s, b in zip(answers, stopped, broken.tolist(), strict=True)
        ],
        cache=progress.cache,
        stats=stats_of(
            progress.cache, prompt_tokens=asked.batch.lengths, new_tokens=lengths, room=asked.room, **measured
        ),
    )


def _warn_of(broken: np.ndarray, lengths: np.ndarray) -> None:
    for row in np.flatnonzero(broken):
        warnings.warn(
            f"row {row} ended after {lengths[row]} new tokens: the model's scores of the next one are NaN or infinite.",
            NonFiniteWarning,
            skip_file_prefixes=(PACKAGE,),
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
