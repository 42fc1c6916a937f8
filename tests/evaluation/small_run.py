"""A run of a random model, small enough for tests; as a script it kills itself half-way.

python small_run.py OUT
"""

import os
import re
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from flax import nnx

import kvjax
import kvjax_models
from kvjax.evaluation import Experiment, contenders, evaluate
from kvjax.rope import Rope


class Words:
    """Words, single digits and signs are the tokens; ids are given out as they come."""

    chat_template = None

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]", text)]

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        words = list(self.ids)
        return " ".join(words[token] if token < len(words) else "?" for token in ids)


class Chats(Words):
    """The same with a chat template."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, add_generation_prompt: bool = True) -> str:
        text = "".join(f"<{message['role']}>\n{message['content']}<end>\n" for message in messages)
        return text + "<assistant>\n" * add_generation_prompt


def make_model() -> kvjax_models.Llama:
    """Two random layers, four query and two KV heads of 8."""
    config = kvjax_models.LlamaConfig(
        vocab_size=2048,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=8),
        tie_word_embeddings=True,
    )
    return kvjax_models.Llama(config, rngs=nnx.Rngs(0))


POLICIES = {
    "snapkv": lambda budget: kvjax.SnapKV(budget=budget, window=8),
    "streaming": kvjax.StreamingLLM(budget=40, prefill_mask="streaming"),
}


def make_experiment(**settings) -> Experiment:
    settings = {
        "contenders": contenders(POLICIES, (48,)),
        "lengths": (200,),
        "depths": (0.0, 1.0),
        "tasks": ("needle", "multi-turn", "perplexity"),
        "text": " ".join(f"{number} apples." for number in range(100, 300)),
        "batch_size": 2,
        **settings,
    }
    return Experiment(**settings)


def run(out, *, report=lambda progress: None, **settings):
    return evaluate(make_model(), Words(), make_experiment(**settings), out=out, model_name="small", report=report)


def _die_half_way(progress) -> None:
    if progress.done >= progress.total // 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(sys.argv[1], report=_die_half_way)
