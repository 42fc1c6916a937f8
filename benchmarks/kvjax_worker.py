"""kvjax's side of `kvpress_comparison.py`: does what is asked with SmolLM2, in the dtype that it is started with.

Costs are measured with the policies' own defaults at 1/8 of the prompt; needles with kvpress's settings. A decoding
step is one of the compiled loop inside `kvjax.generate`, whose time is divided by its steps; `call_seconds` is the
median call of `kvjax.decode`.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from comparison_work import KEPT
from kvpress_settings import with_kvpress_settings
from needle import NEW_TOKENS, answers_of, prompts_of
from step_times import loop_seconds
from streaming import plain_text
from worker_loop import peak_bytes, serve

import kvjax
import kvjax_models
from kvjax.statistics import kept_tokens

POLICIES = {
    "Full": kvjax.Full(),
    "H2O": kvjax.H2O(budget=KEPT),
    "SnapKV": kvjax.SnapKV(budget=KEPT),
    "PyramidKV": kvjax.PyramidKV(budget=KEPT),
}
ANSWER = 12


class Worker:
    """Requests by name; results are what JSON can hold."""

    def __init__(self, model: str, dtype: str):
        self._loaded = kvjax_models.load(model, dtype=dtype)
        self._params = self._loaded.params
        assert self._loaded.tokenizer is not None
        self._tokenizer = self._loaded.tokenizer
        self._prompts: list[list[int]] = []
        self._policy: kvjax.Policy = kvjax.Full()
        self._steps = 0
        self._prefilled: tuple[jax.Array, kvjax.Cache] | None = None

    def text(self, tokens: int, rows: int) -> list[list[int]]:
        """Stretches of a long English text."""
        # No more of it than is needed, since its memory would count: a token has fewer than eight characters here.
        ids = self._tokenizer.encode(plain_text()[: 8 * tokens * rows], add_special_tokens=False)
        return [ids[row * tokens : (row + 1) * tokens] for row in range(rows)]

    def needles(self, tokens: int) -> tuple[list[list[int]], list[str]]:
        """Ten prompts with a needle, and what each hides."""
        return prompts_of(self._tokenizer, tokens)

    def texts(self, tokens: list[list[int]]) -> list[str]:
        """Answers as text."""
        return [self._tokenizer.decode(row) for row in tokens]

    def prepare_prefill(self, policy: str, prompts: list[list[int]], steps: int) -> None:
        """Compiles, and runs once."""
        self._policy, self._prompts, self._steps = POLICIES[policy], prompts, steps
        self._prefill()

    def measure_prefill(self) -> dict[str, float]:
        """A prompt's time."""
        started = time.perf_counter()
        _, cache = self._prefill()
        return {"value": time.perf_counter() - started, "kept": kept_tokens(cache)}

    def prepare_decode(self, policy: str, prompts: list[list[int]], steps: int) -> None:
        """Fills a cache, compiles, and runs once."""
        self._policy, self._prompts, self._steps = POLICIES[policy], prompts, steps
        self._prefilled = self._prefill()
        self.measure_decode()

    def measure_decode(self) -> dict[str, float]:
        """A step's time, from the same cache in every round."""
        assert self._prefilled is not None
        logits, cache = self._prefilled
        return {
            "value": loop_seconds(self._params, logits, cache, steps=self._steps) / self._steps,
            "call_seconds": self._call_seconds(),
            "kept": kept_tokens(cache),
        }

    def release(self) -> None:
        """Forgets the cache and the compiled programs."""
        self._prefilled = None
        jax.clear_caches()

    def peak_of_one_answer(self, policy: str, prompts: list[list[int]], steps: int) -> dict[str, float]:
        """The most memory that loading, a prompt and an answer took in this process."""
        result = kvjax.generate(self._params, prompts, policy=POLICIES[policy], max_new_tokens=steps, stop_tokens=())
        return {"value": peak_bytes(), "kept": result.stats.kept_tokens - steps}

    def answers(self, policy: str, budget: int | float, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy answers, all prompts in one batch."""
        chosen = with_kvpress_settings(policy, budget)
        logits, cache = kvjax.prefill(self._params, prompts, policy=chosen, max_new_tokens=NEW_TOKENS)
        tokens = answers_of(self._params, logits, cache)
        jax.clear_caches()
        return tokens

    def attempt(self, name: str, prompts: list[list[int]]) -> str:
        """What comes of something a user may try."""
        long, short, text = prompts
        attempts = {
            "ragged batch": lambda: self._ragged(long, short),
            "pyramid's second turn": lambda: self._second_turn(kvjax.PyramidKV(budget=KEPT), text[:2048], text[:20]),
            "second turn": lambda: self._second_turn(kvjax.SnapKV(budget=KEPT), text[:2048], text[2048:]),
            "evicting h2o": lambda: self._kept_after(kvjax.H2O(budget=128), long),
            "h2o without n x n": lambda: self._kept_after(kvjax.H2O(budget=KEPT, evict="prompt"), long, answer=0),
            "short prompt": lambda: self._kept_after(kvjax.SnapKV(budget=128), long[:40], answer=0),
            "adakv bytes": lambda: self._bytes_over_full(kvjax.AdaKV(budget=KEPT), text[:2048]),
        }
        return attempts[name]()

    def _prefill(self) -> tuple[jax.Array, kvjax.Cache]:
        logits, cache = kvjax.prefill(self._params, self._prompts, policy=self._policy, max_new_tokens=self._steps)
        return jax.block_until_ready((logits, cache))

    def _call_seconds(self) -> float:
        assert self._prefilled is not None
        logits, cache = jax.block_until_ready(jax.tree.map(jnp.copy, self._prefilled))
        seconds = []
        for _ in range(self._steps):
            started = time.perf_counter()
            logits, cache = kvjax.decode(self._params, cache, np.asarray(logits).argmax(-1))
            logits.block_until_ready()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _ragged(self, *rows: list[int]) -> str:
        def answers(prompts: list[list[int]]) -> np.ndarray:
            policy = kvjax.SnapKV(budget=KEPT)
            return kvjax.generate(self._params, prompts, policy=policy, max_new_tokens=ANSWER, stop_tokens=()).tokens

        alone = np.concatenate([answers([row]) for row in rows])
        same = (answers(list(rows)) == alone).sum(axis=1)
        return f"yes: {same[0]} and {same[1]} of {ANSWER} tokens as alone"

    def _second_turn(self, policy: kvjax.Policy, first: list[int], second: list[int]) -> str:
        _, cache = kvjax.prefill(self._params, first, policy=policy, max_new_tokens=1)
        _, cache = kvjax.extend(self._params, cache, second)
        return f"works: {kept_tokens(cache):,.0f} kept a head"

    def _kept_after(self, policy: kvjax.Policy, prompt: list[int], answer: int = ANSWER) -> str:
        logits, cache = kvjax.prefill(self._params, prompt, policy=policy, max_new_tokens=max(answer, 1))
        for _ in range(answer):
            logits, cache = kvjax.decode(self._params, cache, np.asarray(logits).argmax(-1))
        after = f" after {answer} steps" if answer else ""
        return f"works: {kept_tokens(cache):,.0f} of {len(prompt)} kept a head{after}"

    def _bytes_over_full(self, policy: kvjax.Policy, prompt: list[int]) -> str:
        caches = [kvjax.prefill(self._params, prompt, policy=p, max_new_tokens=1)[1] for p in (policy, kvjax.Full())]
        part, full = (kvjax.cache_bytes(cache) for cache in caches)
        return f"{part / full:.3f}"


if __name__ == "__main__":
    serve(Worker(*sys.argv[1:]))
