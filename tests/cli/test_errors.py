"""What the user got wrong is one sentence on stderr and exit code 2."""

import os
import subprocess
import sys
import warnings

import pytest

import kvjax
from kvjax.cli import generate as generate_command
from kvjax.cli import progress

SNAPKV = ("--policy", "snapkv", "--budget", "64")

WRONG_BEFORE_LOADING = {
    (): "give a prompt: PROMPT, - for stdin, --file PATH or --needle N (or --chat).",
    ("x", "--file", "y"): "give one prompt only, got PROMPT and --file.",
    ("x", "--needle", "90"): "give one prompt only, got PROMPT and --needle.",
    ("x", "--depth", "0.5"): "--depth is where --needle hides its number; give --needle N too.",
    (" \n",): "the prompt is empty.",
    ("\udcff",): "PROMPT is not UTF-8 text: its byte 0 is 0xff.",
    ("x", "--policy", "best"): "--policy must be one of full, streaming-llm, snapkv, ",
    ("x", "--policy", "snapkv"): "--policy snapkv needs a --budget: a number of tokens, or a fraction",
    ("x", "--budget", "64"): "--policy full takes no --budget: it keeps every token; these do: streaming-llm, snapkv, ",
    ("x", "--policy", "streaming-llm"): "StreamingLLM needs a `--budget` or a `window`, got neither.",
    ("x", "--policy", "snapkv", "--budget", "many"): "must be a number of tokens such as 256, or a fraction",
    ("x", "--policy", "snapkv", "--budget", "1.5"): "`--budget` must be a number of tokens (int) or a fraction",
    ("x", "--policy", "snapkv", "--budget", "3"): "`--budget` must be at least `sinks` + `window` = 36 tokens, got 3",
    ("x", *SNAPKV, "--set", "depth=3"): "--policy snapkv has no setting 'depth'; its settings are ",
    ("x", *SNAPKV, "--set", "window"): "--set must be NAME=VALUE, got 'window'.",
    ("x", *SNAPKV, "--set", "window=wide"): "--set window must be an integer, got 'wide'.",
    ("x", *SNAPKV, "--set", "window=0"): "`window` must be at least 1 token, got 0.",
    ("x", *SNAPKV, "--set", "pooling=min"): "--set pooling must be max or avg, got 'min'.",
    ("x", *SNAPKV, "--set", "budget=3"): "give the budget with --budget.",
    ("x", *SNAPKV, "--set", "allocation=even"): "--set allocation must be uniform or pyramid or adaptive, got 'even'.",
    ("x", "--policy", "duo", "--budget", "9"): "--policy duo takes no --budget; these do: streaming-llm, snapkv, ",
    ("x", "--policy", "duo", "--set", "pattern=nowhere"): "a head pattern is a folder with full_attention_heads.tsv",
    ("x", "--set", "window=3"): "--policy full has no setting 'window'; it has none.",
    ("x", "--temperature", "-1"): "`--temperature` must be 0 or more, got -1.0.",
    ("x", "--top-k", "0"): "`--top-k` must be ",
    ("x", "--top-p", "2"): "`--top-p` must be over 0 and at most 1, got 2.0.",
    ("x", "--min-p", "0"): "`--min-p` must be over 0 and at most 1, got 0.0.",
    ("x", "--max-new-tokens", "0"): "`--max-new-tokens` must be at least 1, got 0.",
    ("x", "--max-new-tokens", "some"): "argument --max-new-tokens: invalid int value: 'some'",
    ("x", "--dtype", "int8"): "argument --dtype: invalid choice: 'int8'",
    ("x", "--no-such-option"): "unrecognized arguments: --no-such-option",
    ("x", "--stop", ""): "`--stop` must not be empty.",
    ("--needle", "0"): "`--needle` must be at least 1 token, got 0.",
    ("--needle", "90", "--depth", "2"): "`--depth` must be from 0 to 1, got 2.0.",
    ("--needle", "90", "--depth", "nan"): "`--depth` must be from 0 to 1, got nan.",
    ("--chat", "--json"): "--json is for one answer, --chat for many; give one of them.",
    ("--chat", "--raw"): "--chat needs the chat template that --raw leaves out; give one of them.",
    ("x", "--raw", "--system", "y"): "--system needs the chat template that --raw leaves out; give one of them.",
    ("--chat", "-"): "--chat reads its turns from stdin already; leave out the -.",
    ("--file", "no-such-file"): "no-such-file: No such file or directory.",
    ("x", "--model", "no-such-model"): "`--model` is no file or folder, nor a name on the hub: 'no-such-model'.",
}


def assert_wrong(result, message):
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("kvjax: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("argv", "message"), WRONG_BEFORE_LOADING.items())
def test_wrong_arguments_are_one_sentence(argv, message, run):
    assert_wrong(run("generate", *argv), message)


def test_a_missing_or_unknown_subcommand_is_one_sentence(run):
    assert_wrong(run(), "the following arguments are required: SUBCOMMAND")
    assert_wrong(run("compress"), "invalid choice: 'compress'")
    assert_wrong(run("models", "no-such-model"), "`MODEL` is no file or folder, nor a name on the hub")


def test_a_file_that_is_no_text_is_one_sentence(run, tmp_path):
    file = tmp_path / "image.png"
    file.write_bytes(b"ab\xff")
    assert_wrong(run("generate", "--file", str(file)), f"{file} is not UTF-8 text: its byte 2 is 0xff.")
    assert_wrong(run("generate", "-", stdin=b"\xfe"), "stdin is not UTF-8 text: its byte 0 is 0xfe.")
    assert_wrong(run("generate", "--file", str(tmp_path)), f"{tmp_path}: Is a directory.")


def test_a_checkpoint_without_tokenizer_is_one_sentence(run, parity):
    folder = str(parity / "tiny_seed0")
    assert_wrong(run("generate", "x", "--model", folder), "the checkpoint has no tokenizer, and text needs one.")


def test_what_only_the_model_can_tell_is_one_sentence(generate):
    fraction = ("--policy", "snapkv", "--budget", "0.25")
    assert_wrong(generate("x", *fraction), "`--budget` = 0.25 of the 31 tokens of row 0 is 7 tokens")
    assert_wrong(generate("--needle", "5"), "`--needle` must leave room for needle and question")
    assert_wrong(generate("--needle", "500", "--depth", "2"), "`--depth` must be from 0 to 1, got 2.0.")


def test_ctrl_c_leaves_with_130_and_says_nothing(run, monkeypatch):
    def interrupted(*argv, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "load_model", interrupted)
    assert run("generate", "x") == (130, "", "")


def test_ctrl_c_does_not_wait_for_what_jax_computes():
    program = (
        "import atexit, time; from kvjax.cli.interrupt import abandons_work_after_ctrl_c as abandons\n"
        "atexit.register(time.sleep, 60)\n"
        "with abandons(): raise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert done.returncode == 130


def test_a_warning_of_kvjax_is_one_line(run, monkeypatch):
    def warned(*argv, **settings):
        warnings.warn("the prompt is long.", kvjax.LongContextWarning, stacklevel=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "load_model", warned)
    assert run("generate", "x").err == "kvjax: warning: the prompt is long.\n"


def test_without_rich_a_terminal_is_told_what_to_install(run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(progress.UserError, match=r'pip install "kvjax\[cli\]"'), progress.activity("Waiting"):
        pass


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "import sys; from kvjax.cli.main import main; sys.exit(main())", "models"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
