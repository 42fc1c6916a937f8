"""`kvjax plan`: figures by hand, its table and JSON, and one sentence for what it cannot plan."""

import json
import pathlib
import shutil
import time

import pytest

from kvjax.cli.errors import UserError
from kvjax.cli.planned_model import read_config
from kvjax.cli.policies import POLICIES
from kvjax_models import KNOWN_MODELS, embedded_model

LLAMA = ("llama-3-70b", "--context", "128000", "--batch", "4")
LONG = (
    "kvjax: warning: 128,000 tokens and 256 new ones are more than the 8,192 that the model was trained for: "
    "the figures hold, its answers may not.\n"
)


@pytest.fixture
def plan(run):
    return lambda *argv: run("plan", *argv)


def table(out):
    """The cells of each policy's line."""
    lines = out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("policy "))
    return {line.split("  ")[0]: line.split() for line in lines[first + 1 : lines.index("", first)]}


def test_llama_3_70b_on_four_h100_by_hand(plan):
    result = plan(*LLAMA, "--device", "H100-80GB", "--devices", "4", "--policy", "full", "--policy", "duo")
    assert (result.code, result.err) == (0, LONG)
    # 2 B L n K D P with 80 layers, 8 KV heads of 128, two bytes a number.
    keys_and_values = 4 * 2 * 80 * 128_000 * 8 * 128 * 2
    assert keys_and_values == 167_772_160_000
    assert "4 rows of 128,000 tokens: keys and values of all are 167.8 GB in bfloat16 (41.94 GB a row)" in result.out
    assert "4 x h100-80gb: 320 GB, 13.41 TB/s; a prompt on its way takes 8.187 GB of each" in result.out
    # Slots for 131,072 + 256 tokens of 512 + 4 bytes. A step moves 139.0 GB of weights and 41.98 GB a row.
    cache = 4 * 80 * 8 * (131_072 + 256) * 516
    a_token = (139.006e9 + 4 * 41.985e9) / 4
    share, speed = cache / keys_and_values, 4 * 3.352e12 / a_token
    figures = f"{cache / 1e9:.1f} GB {share:.1%} 3 2 {a_token / 1e9:.2f} GB {speed:.1f}*".replace("%", " %")
    assert table(result.out)["full"] == ["full", "all", *figures.split()]
    assert table(result.out)["duo"][:5] == ["duo", "sparsity", "0.5", "86.95", "GB"]
    assert "* does not fit." in result.out


def test_what_does_not_fit_a_v5e_is_told_with_the_devices_it_takes(plan):
    result = plan(*LLAMA, "--device", "v5e", "--policy", "full", "--policy", "snapkv", "--budget", "4096")
    assert result.code == 0
    # Of 819 GB a second: 4 / ((139.0 + 4 * 41.98) / 819).
    speed = 4 * 819 / (139.0 + 4 * 41.98)
    assert table(result.out)["full"][-1] == f"{speed:.2f}*"
    assert result.out.count("nothing fits") == 1
    assert "the weights alone take 141 GB of 16 GB a device; the smallest cache needs 16 such" in result.out


def test_every_policy_has_a_row_and_every_work_a_recommendation(plan):
    named = [word for name in POLICIES for word in ("--policy", name)]
    result = plan("llama-3.2-1b", "--context", "8192", "--device", "h200", *named)
    assert (result.code, result.err) == (0, "")
    assert list(table(result.out)) == list(POLICIES)
    assert max(map(len, result.out.splitlines())) <= 120
    for work in ("streaming chat: streaming-llm: ", "long-document questions: full: ", "many tenants: "):
        assert f"\n{work}" in result.out


def test_json_has_the_figures(plan):
    result = plan("smollm2-135m", "--context", "4000", "--json", "--dtype", "float32", "--cache-dtype", "bfloat16")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert report["full_cache_bytes"] == 2 * 30 * 4000 * 3 * 64 * 2
    assert report["model"]["weight_bytes"] == 4 * 134_515_008
    assert report["cache_dtype"] == "bfloat16"
    by_name = {entry["name"]: entry for entry in report["policies"]}
    assert by_name["snapkv"]["budget"] == 500
    assert by_name["h2o"]["cache_bytes"] == 30 * (3 * 500 * (256 + 8) + 3 * 4) + 4
    assert report["recommendations"][0]["work"] == "streaming chat"


def test_a_million_tokens_take_no_time(plan):
    def seconds(budget: str) -> float:
        started = time.process_time()
        assert plan("llama-3-70b", "--context", "1000000", "--budget", budget).code == 0
        return time.process_time() - started

    plan("llama-3-70b", "--context", "4096")
    # Of a third of a second; tests check every annotation, and the process's other threads count too.
    assert min(seconds("1024") for _ in range(3)) < 4
    assert min(seconds("0.1") for _ in range(3)) < 4


def test_a_device_of_ones_own(plan):
    own = ("--memory", "1", "--bandwidth", "100")
    result = plan("smollm2-135m", "--context", "1024", *own, "--policy", "full", "--budget", "100")
    assert "1 x device: 1 GB, 100 GB/s" in result.out
    # No kernel: the 1,280 slots are read twice, 256 bytes each.
    step = 2 * 134_515_008 + 30 * 3 * 2 * 1280 * 256
    assert table(result.out)["full"][-1] == f"{100e9 / step:.4g}"
    larger = plan("smollm2-135m", "--context", "1024", "--device", "h200", "--memory", "288", "--policy", "full")
    assert "1 x h200: 288 GB, 4.8 TB/s" in larger.out


def test_a_configuration_alone_is_enough(parity, tmp_path):
    shutil.copy(parity / "tiny_seed0" / "config.json", tmp_path)
    expected = read_config(str(parity / "tiny_seed0"))
    assert expected.num_hidden_layers == 4
    assert read_config(str(tmp_path)) == expected
    assert read_config(str(tmp_path / "config.json")) == expected
    embedded = read_config(str(embedded_model()))
    assert embedded.num_hidden_layers == KNOWN_MODELS["smollm2-135m"].num_hidden_layers
    assert read_config("SmolLM2-135M") == KNOWN_MODELS["smollm2-135m"]


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(parity, monkeypatch):
    import huggingface_hub

    def download(name, file):
        assert (name, file) == ("some-lab/some-llama", "config.json")
        return str(parity / "tiny_seed0" / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert read_config("some-lab/some-llama").num_hidden_layers == 4

    def unreachable(name, file):
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"'some-lab/some-llama' could not be fetched .* no connection"):
        read_config("some-lab/some-llama")


SMALL = ("smollm2-135m", "--context", "1000")
WRONG = {
    (
        *SMALL[:2],
        str(2**31 - 256),
    ): "`--context` + `--max-new-tokens` must not exceed 2,147,483,647",
    (*SMALL[:2], str(10**15)): "`--context` + `--max-new-tokens` must not exceed 2,147,483,647",
    (*SMALL, "--max-new-tokens", str(10**30)): "`--max-new-tokens` must be below 2**30",
    (*SMALL, "--batch", str(10**30)): "`--batch` must not exceed 2,147,483,647 rows, got 1",
    (*SMALL, "--device", "h200", "--bandwidth", "1e300"): "--bandwidth must be a positive number of GB, from 1e-06 to ",
    ("llama-9", "--context", "9", "--sparsity", "2"): "`--sparsity` must be from 0 to 1, got 2.0.",
    ("llama-9", "--context", "9", "--policy", "best"): "--policy must be one of full, ",
    (): "the following arguments are required: MODEL, --context",
    ("llama-9", "--context", "9"): "MODEL must be one of smollm2-135m, smollm2-360m, tinyllama-1.1b, ",
    ("no/where.gguf", "--context", "9"): "or a name on the hub; got 'no/where.gguf'.",
    (*SMALL, "--device", "abacus"): "--device must be one of v5e, v6e, v5p, h100-80gb, ",
    (*SMALL, "--policy", "best"): "--policy must be one of full, streaming-llm, snapkv, ",
    (*SMALL, "--budget", "2000"): "`--budget` must not exceed the `--context` of 1000 tokens, got 2000.",
    (*SMALL, "--budget", "2"): "`--budget` must be at least ",
    (*SMALL, "--budget", "0.01"): "`--budget` = 0.01 of the 1000 tokens of row 0 is 10 tokens",
    (*SMALL, "--devices", "2"): "`--devices` must divide the model's 9 query heads",
    (*SMALL, "--batch", "0"): "`--batch` must be at least 1 row, got 0.",
    (*SMALL, "--max-new-tokens", "0"): "`--max-new-tokens` must be at least 1, got 0.",
    (*SMALL, "--sparsity", "2"): "`--sparsity` must be from 0 to 1, got 2.0.",
    (*SMALL, "--memory", "16"): "--memory and --bandwidth go together where no --device is given.",
    (*SMALL, "--device", "h200", "--memory", "-1"): "--memory must be a positive number of GB, from 1e-06 to ",
    ("smollm2-135m", "--context", "0"): "`--context` must be at least 1 token, got 0.",
    ("smollm2-135m", "--context", "many"): "argument --context: invalid int value: 'many'",
}


@pytest.mark.parametrize(("argv", "message"), WRONG.items())
def test_what_cannot_be_planned_is_one_sentence(argv, message, plan):
    result = plan(*argv)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("kvjax: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_folder_without_a_model_is_one_sentence(plan, tmp_path):
    result = plan(str(tmp_path), "--context", "9")
    assert result.code == 2
    assert str(tmp_path) in result.err


def test_a_damaged_configuration_is_one_sentence(plan, tmp_path):
    file = pathlib.Path(tmp_path / "config.json")
    file.write_text("{")
    result = plan(str(file), "--context", "9")
    assert result.code == 2
    assert f"{file} is not JSON" in result.err
    with pytest.raises(UserError):
        read_config(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**9),
        ("max_position_embeddings", 10**30),
        ("num_attention_heads", 0),
        ("vocab_size", True),
    ],
)
def test_sizes_that_no_model_has_are_one_sentence(plan, parity, tmp_path, name, value):
    file = pathlib.Path(tmp_path / "config.json")
    file.write_text(json.dumps(json.loads((parity / "tiny_seed0" / "config.json").read_text()) | {name: value}))
    result = plan(str(file), "--context", "9")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"kvjax: error: {file}: `{name}` must be " in result.err


def test_no_model_is_not_the_current_folder(plan, parity, monkeypatch):
    monkeypatch.chdir(parity / "tiny_seed0")
    result = plan("", "--context", "9")
    assert result.code == 2
    assert "must be a path or a name on the hub, got ''" in result.err
