"""`kvjax inspect`: a picture and tables of what is kept."""

import atexit
import json
import sys

import numpy as np
import pytest

import kvjax
from kvjax.cli import inspect as inspect_command
from kvjax.cli.retention import span_with, spans
from kvjax.inspection import TokenRetention

QUESTION = "What is the capital of France?"
# The whole prompt and its context are one compiled shape.
NEEDLE = ("--needle", "46", "--raw", "--queries", "4", "--policy", "streaming-llm", "--budget", "20")


@pytest.fixture
def inspect(run, tmp_path, monkeypatch):
    """Runs `kvjax inspect` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv, **stdin: run("inspect", *argv, **stdin)


@pytest.mark.smollm2
@pytest.mark.usefixtures("generate")  # The embedded model, loaded already.
def test_tells_the_same_in_a_picture_in_tables_and_in_json(inspect, smollm2, tmp_path):
    result = inspect(*NEEDLE)
    assert result.code == 0
    assert result.err.startswith("kvjax: the number ")
    assert result.err.endswith("kvjax: wrote retention.png\n")
    assert_is_a_picture_with_content(tmp_path / "retention.png")

    report = json.loads(inspect(*NEEDLE, "--json", "--out", str(tmp_path / "other.png")).out)
    assert report["picture"] == str(tmp_path / "other.png")
    assert_is_a_picture_with_content(tmp_path / "other.png")
    assert report["policy"] | {"name": "streaming-llm", "budget": 20} == report["policy"]
    assert np.shape(report["kept_tokens"]) == (30, 3)
    assert (np.asarray(report["kept_tokens"]) == 20).all()
    kept, oracle = (np.asarray(report["attention"][name]) for name in ("kept", "oracle"))
    assert ((kept > 0) & (kept <= oracle) & (oracle <= 1)).all()
    tokens = [entry["token"] for entry in report["tokens"]]
    text = "".join(entry["text"] for entry in report["tokens"])
    assert text == smollm2.tokenizer.decode(tokens, skip_special_tokens=False)
    assert report["needle"]["number"] in text
    assert [entry["heads"] for entry in report["tokens"]] == [90] * 4 + [0] * (len(tokens) - 20) + [90] * 16

    first, second, number, _, head, *lines = result.out.splitlines()
    assert first.startswith(f"StreamingLLM(budget=20) keeps {2000 / len(tokens):.1f} % of {len(tokens)} tokens, ")
    assert second == (
        f"of the last 4 tokens' attention to those before: {kept.mean():.1%} held, {oracle.mean():.1%} at best"
    ).replace("%", " %")
    assert number == f"the number {report['needle']['number']} is kept by 0.0 % of the 90 heads"
    assert head.split() == ["layer", "tokens", "a", "head", "attention", "held", "at", "best"]
    assert lines[29].split()[:2] == ["29", "20"]
    assert any(line.startswith("100.0 %") and line.endswith(' is"') for line in lines)

    listed = inspect(*NEEDLE, "--all").out.splitlines()[-len(tokens) :]
    assert [line.split()[:2] for line in listed] == [[str(e["heads"]), str(e["position"])] for e in report["tokens"]]
    assert [json.loads(line.split(maxsplit=2)[2]) for line in listed] == [entry["text"] for entry in report["tokens"]]


@pytest.mark.smollm2
@pytest.mark.usefixtures("generate")
def test_prompts_are_those_of_generate(inspect, smollm2, monkeypatch):
    taken = []

    def take(params, tokens, *, policy, queries):
        taken.append((tokens, policy, queries))
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_command, "attention_mass", take)
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    tokenizer, chat = smollm2.tokenizer, [{"role": "user", "content": QUESTION}]
    raw = tokenizer.encode(QUESTION)
    assert inspect("-", "--raw", stdin=QUESTION.encode()).code == 130
    assert inspect(QUESTION, "--raw", "--queries", "2").code == 130
    assert taken == [(raw, kvjax.Full(), len(raw) // 2), (raw, kvjax.Full(), 2)]
    for system in ({}, {"--system": "Be brief."}):
        messages = [{"role": "system", "content": text} for text in system.values()] + chat
        wanted = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        assert inspect(QUESTION, *[text for pair in system.items() for text in pair]).code == 130
        assert taken[-1][0] == wanted


@pytest.mark.smollm2
@pytest.mark.usefixtures("generate")
def test_what_only_the_prompt_can_tell_is_one_sentence(inspect):
    assert_wrong(
        inspect(QUESTION, "--raw", "--queries", "7"),
        "`--queries` must be at least 1 and leave at least one token of context, got 7 for a row of 7 tokens.",
    )


WRONG_BEFORE_LOADING = {
    (): "give a prompt: PROMPT, - for stdin, --file PATH or --needle N.",
    ("x", "--needle", "90"): "give one prompt only, got PROMPT and --needle.",
    ("x", "--chat"): "unrecognized arguments: --chat",
    ("x", "--raw", "--system", "y"): "--system needs the chat template that --raw leaves out; give one of them.",
    ("x", "--policy", "snapkv"): "--policy snapkv needs a --budget: a number of tokens, or a fraction",
    ("x", "--out", "map.gif"): "--out must end in .png, .svg, .pdf, got 'map.gif'.",
    ("x", "--out", "no-such-folder/map.png"): "--out must lie in a folder that exists, and no-such-folder does not.",
    ("x", "--queries", "few"): "argument --queries: invalid int value: 'few'",
    ("x", "--model", "no-such-model"): "`--model` is no file or folder, nor a name on the hub: 'no-such-model'.",
}


def assert_wrong(result, message):
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("kvjax: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("argv", "message"), WRONG_BEFORE_LOADING.items())
def test_wrong_arguments_are_one_sentence(argv, message, inspect):
    assert_wrong(inspect(*argv), message)


def test_without_matplotlib_it_says_what_to_install(inspect, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_wrong(inspect("x"), 'a plot needs `pip install "kvjax[plot]"`')


def test_a_checkpoint_without_tokenizer_is_one_sentence(inspect, parity):
    folder = str(parity / "tiny_seed0")
    assert_wrong(inspect("x", "--model", folder), "the checkpoint has no tokenizer, and text needs one.")


def test_spans_are_about_sentences():
    texts = ["A", " b", ".", " It", " costs", " 3", ".", "5", ".", "\n", "\n", *["x"] * 30]
    table = [TokenRetention(at, 0, text, at % 2) for at, text in enumerate(texts)]
    assert [(span.first, span.last) for span in spans(table, heads=2)] == [(0, 2), (3, 10), (11, 34), (35, 40)]
    span = span_with(table, "3.5", heads=2)
    assert (span.first, span.last, span.text, span.share) == (5, 7, " 3.5", 1 / 3)


def assert_is_a_picture_with_content(path):
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[:2] == (900, 1440)
    blue = (np.abs(pixels[..., :3] - np.array([0x1F, 0x4E, 0x9C]) / 255) < 0.01).all(-1)
    assert 0.1 < blue.mean() < 0.7
