# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "kvpress==0.5.5", "gguf"]
# ///
"""kvpress's side of `kvpress_comparison.py`: does what is asked with SmolLM2, in the dtype that it is started with.

kvpress at its best on CPU: torch's own number of threads (the cores), `inference_mode`, logits of the last token only,
"sdpa" attention wherever the press allows it ("eager" for ObservedAttentionPress's prompt), no static cache and no
`torch.compile`, which presses do not go with. Presses have their defaults and remove 7/8 of the prompt. A decoding step
is one call of the model on the compressed cache, at the token's true position, and the choice of the next token.
"""

import os
import pathlib
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import kvpress
import torch
import transformers
from comparison_work import KEPT
from kvpress.presses.scorer_press import ScorerPress
from worker_loop import peak_bytes, serve

NEW_TOKENS, STOP, ANSWER = 28, 2, 12
PRESSES = {
    "StreamingLLM": kvpress.StreamingLLMPress,
    "H2O": kvpress.ObservedAttentionPress,
    "SnapKV": kvpress.SnapKVPress,
    "PyramidKV": kvpress.PyramidKVPress,
    "AdaKV": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "TOVA": kvpress.TOVAPress,
    "Knorm": kvpress.KnormPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
}


def press_of(method: str, kept: float):
    """The press that keeps this share of the prompt; None for the full cache."""
    return None if method == "Full" else PRESSES[method](1 - kept)


def cache_bytes(cache) -> int:
    """Bytes of all keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def kept(cache) -> float:
    """Tokens a head, the mean over layers."""
    return sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)


class Votes(kvpress.ObservedAttentionPress):
    """ObservedAttentionPress that counts the queries whose attention makes its scores."""

    queries = 0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        """See the press."""
        scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
        Votes.queries = attentions.shape[2]
        return scores


class Worker:
    """Requests by name; results are what JSON can hold."""

    def __init__(self, gguf: pathlib.Path, dtype: str):
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype)
        ).eval()
        self._policy, self._prompts, self._steps = "Full", torch.zeros(1, 0), 0
        self._prefilled = None

    def prepare_prefill(self, policy, prompts, steps):
        """Runs once."""
        self._policy, self._prompts, self._steps = policy, torch.tensor(prompts), steps
        self._prefill()

    def measure_prefill(self):
        """A prompt's time."""
        started = time.perf_counter()
        _, cache = self._prefill()
        return {"value": time.perf_counter() - started, "kept": kept(cache)}

    def prepare_decode(self, policy, prompts, steps):
        """Fills a cache, and runs once."""
        self._policy, self._prompts, self._steps = policy, torch.tensor(prompts), steps
        logits, cache = self._prefill()
        self._prefilled = logits, [(layer.keys, layer.values) for layer in cache.layers], cache
        self.measure_decode()

    def measure_decode(self):
        """A step's time, from the same cache in every round."""
        logits, tensors, cache = self._prefilled
        for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
            layer.keys, layer.values = keys, values
        size = kept(cache)
        started = time.perf_counter()
        self._continue(logits, cache, self._prompts.shape[1], self._steps)
        return {"value": (time.perf_counter() - started) / self._steps, "kept": size}

    def release(self):
        """Forgets the cache."""
        self._prefilled = None

    def peak_of_one_answer(self, policy, prompts, steps):
        """The most memory that loading, a prompt and an answer took in this process."""
        self._policy, self._prompts = policy, torch.tensor(prompts)
        logits, cache = self._prefill()
        size = kept(cache)
        self._continue(logits, cache, self._prompts.shape[1], steps)
        return {"value": peak_bytes(), "kept": size}

    def answers(self, policy, budget, prompts):
        """Greedy answers, one prompt after the other."""
        return [self._answer(policy, budget if budget <= 1 else budget / len(ids), ids, NEW_TOKENS) for ids in prompts]

    def attempt(self, name, prompts):
        """What comes of something a user may try."""
        long, short, text = prompts
        attempts = {
            "ragged batch": lambda: self._ragged(long, short),
            "pyramid's second turn": lambda: self._second_turn("PyramidKV", 0.7, text[:2048], text[:20]),
            "second turn": lambda: self._second_turn("SnapKV", KEPT, text[:2048], text[2048:]),
            "evicting h2o": lambda: self._evicting(long),
            "h2o without n x n": lambda: self._kept_of(press_of("H2O", KEPT), long),
            "short prompt": lambda: self._kept_of(press_of("SnapKV", KEPT), long[:40]),
            "adakv bytes": lambda: self._bytes_over_full(text[:2048]),
        }
        return attempts[name]()

    def _prefill(self):
        press = press_of(self._policy, KEPT)
        self._model.set_attn_implementation("eager" if self._policy == "H2O" else "sdpa")
        result = self._run(self._prompts, transformers.DynamicCache(), press)
        self._model.set_attn_implementation("sdpa")
        return result

    @torch.inference_mode()
    def _run(self, ids, cache, press=None, **arguments):
        """Logits [B, V] of the last token, and the cache."""
        if press is None:
            return self._model(ids, past_key_values=cache, logits_to_keep=1, **arguments).logits[:, -1], cache
        with press(self._model):
            return self._run(ids, cache, **arguments)

    def _continue(self, logits, cache, position, steps, stop=None, mask=None):
        """The tokens that follow, greedily; `mask` [B, T] of the prompt, if it has pads."""
        tokens = []
        for step in range(steps):
            token = logits.argmax(-1, keepdim=True)
            if stop is not None and int(token[0, 0]) == stop:
                break
            tokens.append(token)
            places = torch.zeros_like(token) + position + step
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            logits, cache = self._run(token, cache, position_ids=places, attention_mask=mask)
        return torch.cat(tokens, dim=1) if tokens else torch.zeros(1, 0, dtype=torch.int64)

    def _answer(self, policy, share, ids, steps, stop=STOP):
        self._policy, self._prompts = policy, torch.tensor([ids])
        self._model.set_attn_implementation("eager" if policy == "H2O" else "sdpa")
        logits, cache = self._run(self._prompts, transformers.DynamicCache(), press_of(policy, share))
        self._model.set_attn_implementation("sdpa")
        return self._continue(logits, cache, len(ids), steps, stop)[0].tolist()

    def _ragged(self, long, short):
        pads = len(long) - len(short)
        ids = torch.tensor([long, [0] * pads + short])
        mask = torch.ones_like(ids)
        mask[1, :pads] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        alone = [torch.tensor(self._answer("SnapKV", KEPT, row, ANSWER, None)) for row in (long, short)]
        counts = []
        for decoding_mask in (mask, None):
            logits, cache = self._run(
                ids, transformers.DynamicCache(), press_of("SnapKV", KEPT), attention_mask=mask, position_ids=places
            )
            lengths = torch.tensor([[len(long)], [len(short)]])
            tokens = self._continue(logits, cache, lengths, ANSWER, mask=decoding_mask)
            counts += [int((row == wanted).sum()) for row, wanted in zip(tokens, alone, strict=True)]
        verdict = "yes" if max(sum(counts[:2]), sum(counts[2:])) == 2 * ANSWER else "no"
        return (
            f"{verdict}: {counts[0]} and {counts[1]} of {ANSWER} tokens as alone with the batch's mask, "
            f"{counts[2]} and {counts[3]} without"
        )

    def _second_turn(self, method, share, first, second):
        press = press_of(method, share)
        _, cache = self._run(torch.tensor([first]), transformers.DynamicCache(), press)
        places = torch.arange(len(first), len(first) + len(second))[None]
        _, cache = self._run(torch.tensor([second]), cache, press, position_ids=places)
        return f"works: {kept(cache):,.0f} kept a head"

    def _evicting(self, prompt):
        votes = Votes(0.0)
        press = kvpress.DecodingPress(base_press=votes, compression_interval=1, target_size=128)
        self._model.set_attn_implementation("eager")
        try:
            logits, cache = self._run(torch.tensor([prompt]), transformers.DynamicCache())
            with press(self._model):
                self._continue(logits, cache, len(prompt), ANSWER)
        finally:
            self._model.set_attn_implementation("sdpa")
        return f"{kept(cache):,.0f} kept a head, by the attention of {Votes.queries} query, not of all so far"

    def _kept_of(self, press, ids):
        assert isinstance(press, ScorerPress)
        _, cache = self._run(torch.tensor([ids]), transformers.DynamicCache(), press)
        return f"works: {kept(cache):,.0f} of {len(ids)} kept a head"

    def _bytes_over_full(self, ids):
        sizes = []
        for method in ("AdaKV", "Full"):
            _, cache = self._run(torch.tensor([ids]), transformers.DynamicCache(), press_of(method, KEPT))
            sizes.append(cache_bytes(cache))
        return f"{sizes[0] / sizes[1]:.3f}"


if __name__ == "__main__":
    serve(Worker(pathlib.Path(sys.argv[1]), sys.argv[2]))
