"""`kvjax generate` with the real small model.

Prompts of 33 to 48 tokens and 16 new ones are one compiled shape.
"""

import json

import numpy as np
import pytest

import kvjax

pytestmark = pytest.mark.smollm2

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FACTS = (
    "Paris lies on the Seine, in the north of France. "
    "It is by far the largest city of the whole country, and it is old."
)
SHORT = ("--max-new-tokens", "16")


@pytest.fixture
def arguments(generate, monkeypatch):
    """The arguments of `kvjax.generate` that come of a command."""

    class NotRunError(ValueError):
        pass

    def call(*argv):
        taken = {}

        def take(params, prompt, **settings):
            taken.update(settings, prompt=prompt)
            raise NotRunError

        with monkeypatch.context() as patch:
            patch.setattr(kvjax, "generate", take)
            assert generate(*argv).code == 2
        return taken

    return call


def test_streams_the_text_that_json_reports(generate):
    streamed = generate(QUESTION, *SHORT)
    assert (streamed.code, streamed.out) == (0, f"{ANSWER}\n")
    reported = json.loads(generate(QUESTION, *SHORT, "--json").out)
    assert reported["text"] == ANSWER
    assert reported["length"] == len(reported["tokens"]) == reported["stats"]["new_tokens"] == 8
    assert reported["finish_reason"] == "stop"
    assert reported["stats"]["prompt_tokens"] == 37
    assert reported["policy"] == {"name": "full"}
    assert reported["model"]["name"] == "SmolLM2-135M-Instruct"


def test_the_last_line_on_stderr_tells_times_and_bytes(generate):
    # Once it is compiled.
    generate(QUESTION, *SHORT)
    prefill, first, speed, cache = generate(QUESTION, *SHORT).err.strip().split(" · ")
    assert (prefill.split()[0], first.split()[:2], speed.split()[1]) == ("prefill", ["first", "token"], "tokens/s")
    assert cache.startswith("cache ")
    assert cache.endswith(" MB (full)")


@pytest.mark.parametrize("source", ["-", "--file"])
def test_stdin_and_a_file_are_prompts_like_any_other(source, generate, tmp_path):
    file = tmp_path / "question.txt"
    file.write_text(QUESTION + "\n", encoding="utf-8")
    argv = [source] if source == "-" else [source, str(file)]
    result = generate(*argv, *SHORT, stdin=f"{QUESTION}\n".encode())
    assert result.out == f"{ANSWER}\n"


def test_raw_leaves_out_the_chat_template(generate, smollm2):
    prompt = smollm2.tokenizer.encode(f"{FACTS} The capital of France is")
    assert 33 <= len(prompt) <= 48
    reported = json.loads(generate(f"{FACTS} The capital of France is", "--raw", *SHORT, "--json").out)
    expected = kvjax.generate(smollm2.params, prompt, max_new_tokens=16)
    assert reported["stats"]["prompt_tokens"] == len(prompt)
    assert reported["tokens"] == expected.tokens[0, : expected.lengths[0]].tolist()


def test_a_system_message_begins_the_chat(arguments, smollm2):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    text = smollm2.tokenizer.apply_chat_template(chat)
    taken = arguments(QUESTION, "--system", "Be brief.")
    assert taken["prompt"] == smollm2.tokenizer.encode(text, add_special_tokens=False)


def test_stop_strings_end_the_text(generate):
    result = generate(QUESTION, *SHORT, "--stop", " France", "--stop", "Rome")
    assert result.out == "The capital of\n"


def test_characters_of_several_tokens_come_whole(generate, smollm2):
    result = generate("Write 🙂 and é.", *SHORT)
    reported = json.loads(generate("Write 🙂 and é.", *SHORT, "--json").out)
    assert result.out == f"{reported['text']}\n"
    assert reported["text"] == smollm2.tokenizer.decode(np.asarray(reported["tokens"]))


def test_sampling_options_reach_the_library(arguments):
    wanted = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 3, "cache_dtype": "bfloat16"}
    wanted["implementation"] = "xla"
    options = [text for name, value in wanted.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    taken = arguments(QUESTION, *options)
    assert {name: taken[name] for name in wanted} == wanted
    assert (taken["max_new_tokens"], taken["policy"]) == (256, kvjax.Full())


def test_set_gives_a_policy_its_settings(arguments):
    settings = ("--set", "window=8", "--set", "pooling=avg", "--set", "sinks=2")
    taken = arguments(QUESTION, "--policy", "snapkv", "--budget", "0.5", *settings)
    assert taken["policy"] == kvjax.SnapKV(budget=0.5, window=8, pooling="avg", sinks=2)
    taken = arguments(QUESTION, "--policy", "streaming-llm", "--set", "window=60")
    assert taken["policy"] == kvjax.StreamingLLM(window=60)
    taken = arguments(QUESTION, "--policy", "h2o", "--budget", "64", "--set", "recent_tokens=none")
    assert taken["policy"] == kvjax.H2O(budget=64, recent_tokens=None)
    taken = arguments(QUESTION, "--policy", "knorm", "--budget", "64", "--set", "allocation=adaptive")
    assert taken["policy"] == kvjax.Knorm(budget=64, allocation=kvjax.Adaptive())


def test_duo_takes_the_folder_of_a_head_pattern(arguments, tmp_path):
    pattern = kvjax.HeadPattern.of(np.tile([0.0, 0.5, 1.0], (30, 1)))
    pattern.save(tmp_path)
    taken = arguments(QUESTION, "--policy", "duo", "--set", f"pattern={tmp_path}", "--set", "threshold=0.4")
    assert taken["policy"] == kvjax.DuoAttention(pattern=pattern, threshold=0.4)


def test_snapkv_finds_the_needle(generate):
    policy = ("--policy", "snapkv", "--budget", "256")
    result = generate("--needle", "600", "--seed", "1", *policy)
    assert result.code == 0
    assert result.err.startswith("kvjax: the number 56063 is hidden at depth 0.5 of about 600 tokens\n")
    assert "56063" in result.out
    assert result.err.endswith("kvjax: the answer has the number 56063\n")
    assert " full (45 %)\n" in result.err


def test_a_missed_needle_is_told(generate):
    result = generate("--needle", "46", "--raw", *SHORT, "--stop", " ", "--json")
    reported = json.loads(result.out)
    assert reported["needle"] == {"number": "67326", "found": False}
    assert reported["text"] == ""
    assert result.err.endswith("kvjax: the answer does not have the number 67326\n")
