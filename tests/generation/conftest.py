"""The model, the policies and the tokenizers of the tests of generation."""

import dataclasses
from collections.abc import Callable

import pytest
from flax import nnx

import kvjax
import kvjax_models

PATTERN = kvjax.HeadPattern.of([[0.1, 0.9], [0.8, 0.7], [0.2, 0.3], [0.6, 0.4]])
POLICIES = {
    "full": lambda budget: kvjax.Full(),
    "streaming_llm": lambda budget: kvjax.StreamingLLM(budget=budget),
    "streaming_llm_masked": lambda budget: kvjax.StreamingLLM(budget=budget, prefill_mask="streaming"),
    "snapkv": lambda budget: kvjax.SnapKV(budget=budget, window=4, kernel=3),
    "h2o": lambda budget: kvjax.H2O(budget=budget),
    "ada_kv": lambda budget: kvjax.AdaKV(budget=budget, window=4, kernel=3),
    "pyramidkv": lambda budget: kvjax.PyramidKV(budget=budget, window=4, kernel=3),
    "duo_attention": lambda budget: kvjax.DuoAttention(pattern=PATTERN, sinks=4, recent=budget - 4),
}


class Words:
    """A tokenizer whose token 17 is the text "17 "; 1 begins a text, and 2 is special."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [int(word) for word in text.split()]

    def decode(self, ids, /, *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids if not (skip_special_tokens and token == 2))


class ChatWords(Words):
    """Its template gives [401, content, 2, 3] for a message, [402] where an answer begins, and puts 1 first."""

    chat_template = "a template"

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        words = text.replace("question", "7").replace("kvjaxanswer", "8")
        return super().encode(words, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, *, add_generation_prompt: bool) -> str:
        opened = {"system": "400 ", "user": "401 ", "assistant": "402 "}
        turns = "".join(f"{opened[message['role']]}{message['content']} 2 3 " for message in messages)
        return f"1 {turns}{'402 ' * add_generation_prompt}"


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def chat_words() -> ChatWords:
    return ChatWords()


def _cut(llama: kvjax_models.Llama, **changes) -> kvjax_models.Llama:
    config = dataclasses.replace(llama.config, **changes)
    other = kvjax_models.Llama(config, rngs=nnx.Rngs(0))
    other.embedding, other.norm, other.lm_head = llama.embedding, llama.norm, llama.lm_head
    other.layers = nnx.List(list(llama.layers)[: config.num_hidden_layers])
    return other


@pytest.fixture(scope="session")
def cut() -> Callable[..., kvjax_models.Llama]:
    """Makes a model with the same weights and another configuration."""
    return _cut


@pytest.fixture(scope="session")
def model(tiny) -> kvjax_models.Llama:
    """The first two layers of the random Llama: half the time to compile."""
    return _cut(tiny, num_hidden_layers=2)


@pytest.fixture(scope="session")
def policy_of() -> Callable[[str, int], kvjax.Policy]:
    """Makes a policy by its name and budget."""
    return lambda name, budget: POLICIES[name](budget)


@pytest.fixture
def policy(request) -> kvjax.Policy:
    return POLICIES[request.param](10)
