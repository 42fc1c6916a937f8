"""The checked arguments of `generate`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from kvjax.flattening import flatten
from kvjax.implementation import check_implementation
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.policies.full import Full
from kvjax.prompts import Batch, Behind, batch_of, check_new_tokens, check_policy, token_rows
from kvjax.sampling import Sampling, SamplingArrays, row_keys
from kvjax.state import Cache
from kvjax.steps import check_cache, dtype_name
from kvjax.tokenizing import Tokenizer, check_tokenizer
from kvjax_kernels.dispatch import Implementation


class Question(NamedTuple):
    """Checked arguments of `generate`.

    Attributes:
        model: the model.
        batch: the prompts.
        policy: keeps the cache.
        room: the longest answer.
        cache: what the prompt continues, or None.
        cache_dtype: of a new cache.
        implementation: which kernels run.
        sampling: how tokens are chosen.
        keys: [B], of draws.
        stops: ids that end an answer.
        stop_texts: texts that end an answer.
        tokenizer: decodes, or None.
    """

    model: Model
    batch: Batch
    policy: Policy
    room: int
    cache: Cache | None
    cache_dtype: object
    implementation: Implementation
    sampling: SamplingArrays | None
    keys: jax.Array
    stops: np.ndarray
    stop_texts: tuple[str, ...]
    tokenizer: Tokenizer | None


def question(
    params: Model,
    prompt: object,
    *,
    policy: Policy | None = None,
    max_new_tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling,
    seed: object = 0,
    stop_tokens: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    cache: Cache | None = None,
    cache_dtype: object = None,
    implementation: str | Mapping[str, str] | None = None,
) -> Question:
    """Checks the arguments of `generate`; see there."""
    model, tokenizer = check_model(params), check_tokenizer(tokenizer)
    if any(isinstance(leaf, Tracer) for leaf in flatten(model)[0]):
        raise ValueError(
            "`params` must be known arrays, got traced ones: `generate` looks at its tokens as they come. Call it "
            "outside of `jax.jit`, `jax.vmap` and `jax.grad`; `kvjax.decode` can be called under `jax.jit`."
        )
    room = check_new_tokens(max_new_tokens)
    stops = _stop_tokens(stop_tokens, model)
    policy = _policy(policy, cache, model, cache_dtype)
    behind = None
    if cache is not None:
        ends = (*model.spec.stop_tokens, *stops.tolist())
        behind = Behind.cache(cache.known, len(cache.next_position), ends)
    stop_texts = _stop_strings(stop_strings, tokenizer)
    forced = check_implementation(implementation)
    batch = batch_of(token_rows(prompt, model=model.spec, tokenizer=tokenizer, behind=behind))
    return Question(
        model=model,
        batch=batch,
        policy=policy,
        room=room,
        cache=cache if cache is None or forced is None else cache.using(forced),
        cache_dtype=cache_dtype,
        implementation=forced,
        sampling=sampling.arrays(),
        keys=row_keys(seed, len(batch.lengths)),
        stops=stops,
        stop_texts=stop_texts,
        tokenizer=tokenizer,
    )


def _stop_strings(stop_strings: str | Sequence[str], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    texts = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`stop_strings` must be a text or a list of texts, got {stop_strings!r}.")
    texts = tuple(texts)
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


def _stop_tokens(stop_tokens: int | Sequence[int] | None, model: Model) -> np.ndarray:
    ids = np.asarray(model.spec.stop_tokens if stop_tokens is None else stop_tokens).reshape(-1)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"`stop_tokens` must be integers, got {stop_tokens!r}.")
    for token in ids.tolist():
        if not 0 <= token < model.spec.vocab_size:
            raise ValueError(f"`stop_tokens` must be from 0 to {model.spec.vocab_size - 1}, got {token}.")
    return ids.astype(np.int32)
