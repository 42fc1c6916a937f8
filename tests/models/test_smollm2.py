"""The small real model: tokens, logits, and what loading it costs."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.smollm2

PROMPTS = ["capital", "story", "plain", "unicode", "long"]


@pytest.fixture(scope="module")
def record(parity):
    return json.loads((parity / "smollm2.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_become_the_ids_of_hugging_face(name, record, smollm2):
    assert smollm2.tokenizer.encode(record[name]["prompt"]) == record[name]["input_ids"]


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_become_the_text_of_hugging_face(name, record, smollm2):
    text = smollm2.tokenizer.decode(record[name]["greedy_ids"], skip_special_tokens=False)
    # The reference was made with transformers' clean-up of spaces, which SmolLM2's own settings switch off.
    assert text.replace(" ?", "?") == record[name]["greedy_text"]


def test_the_chat_template_gives_the_prompt_of_hugging_face(record, smollm2):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert smollm2.tokenizer.apply_chat_template(chat) == record["capital"]["prompt"]


def test_special_tokens_are_skipped_when_decoding(record, smollm2):
    assert smollm2.tokenizer.decode(record["capital"]["greedy_ids"]) == "The capital of France is Paris."


@pytest.mark.parametrize("name", ["capital", "plain", "unicode"])
def test_the_best_logits_are_those_of_hugging_face(name, record, smollm2, dense_logits):
    expected = record[name]
    logits = dense_logits(smollm2.params, np.array(expected["input_ids"]))[-1]
    assert np.argsort(-logits)[:10].tolist() == expected["top_ids"]
    np.testing.assert_allclose(logits[expected["top_ids"]], expected["top_logits"], rtol=0, atol=2e-3)


def test_the_end_of_a_turn_stops_the_answer(smollm2):
    assert smollm2.config.eos_token_ids == (2,)
    assert smollm2.tokenizer.encode("<|im_end|>") == [2]
    assert smollm2.tokenizer.eos_token == "<|im_end|>"


def test_loading_takes_five_seconds_and_one_and_a_half_gigabytes_at_most():
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the peak of resident memory is read from /proc")
    # VmHWM: unlike ru_maxrss it leaves out the memory of the process that started this one.
    program = (
        "import time, jax, kvjax_models as m; file = m.embedded_model(); start = time.perf_counter();"
        "loaded = m.load(file, 'float32'); jax.block_until_ready(loaded.params.embedding[...]);"
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')];"
        "print(time.perf_counter() - start, int(peak[0]) / 1e6)"
    )
    # The best of a few, because other work on the machine counts too.
    seconds, gigabytes = min(_run(program) for _ in range(4))
    assert seconds < 5
    assert gigabytes < 1.5


def _run(program: str) -> tuple[float, float]:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, gigabytes = result.stdout.split()
    return float(seconds), float(gigabytes)
