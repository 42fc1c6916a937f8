"""Orbax checkpoints give back what was saved, or say what is wrong."""

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax_models
from kvjax_models.weights import parameters


@pytest.fixture(scope="module")
def saved(parity, tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "tiny"
    kvjax_models.save(path, kvjax_models.load(parity / "tiny_seed0"))
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "tiny")


def change_config(path, **fields):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def assert_equal_bits(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert array.dtype == theirs[path].dtype
        assert np.asarray(array).tobytes() == np.asarray(theirs[path]).tobytes(), path


@pytest.mark.parametrize("name", ["tiny_seed0", "variant_rope_llama3", "variant_tied_embeddings"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_read_back_bit_for_bit(name, dtype, parity, tmp_path):
    loaded = kvjax_models.load(parity / name, dtype)
    kvjax_models.save(tmp_path / "saved", loaded.params)
    again = kvjax_models.load(tmp_path / "saved")
    assert again.config == loaded.config
    assert_equal_bits(again.params, loaded.params)


def test_a_dtype_that_is_asked_for_is_given(saved):
    model = kvjax_models.load(saved, "bfloat16").params
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype("bfloat16")}


def test_the_tokenizer_is_saved_with_the_model(smollm2, parity, tmp_path):
    tiny = kvjax_models.load(parity / "tiny_seed0")
    kvjax_models.save(tmp_path / "saved", tiny._replace(tokenizer=smollm2.tokenizer))
    tokenizer = kvjax_models.load(tmp_path / "saved").tokenizer
    text = "<|im_start|>user\nÄpfel, 1234 — ok 日本<|im_end|>"
    assert tokenizer is not None
    assert tokenizer.encode(text) == smollm2.tokenizer.encode(text)
    assert tokenizer.chat_template == smollm2.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_saving_over_something_is_refused(saved, parity):
    with pytest.raises(FileExistsError, match=rf"`path` must be a new or empty folder, got {saved}"):
        kvjax_models.save(saved, kvjax_models.load(parity / "tiny_seed0"))


@pytest.mark.usefixtures("no_shape_checks")
def test_a_failed_save_leaves_nothing(parity, tmp_path, monkeypatch):
    def full(tokenizer, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax_models.checkpoint.save_tokenizer", full)
    tiny = kvjax_models.load(parity / "tiny_seed0")
    with pytest.raises(OSError, match="No space left"):
        kvjax_models.save(tmp_path / "saved", tiny._replace(tokenizer=object()))  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())


def test_a_missing_tensor_is_named(damaged):
    change_config(damaged, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"orbax lacks the tensor 'layers.4.* which its config.json asks for"):
        kvjax_models.load(damaged)


def test_a_surplus_tensor_is_named(damaged):
    change_config(damaged, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"orbax holds the tensor 'layers.3.*, which its config.json has no"):
        kvjax_models.load(damaged)


def test_a_misshapen_tensor_is_named(damaged):
    change_config(damaged, intermediate_size=64)
    with pytest.raises(ValueError, match=r"the tensor 'layers.0.*' must be .*64.* got .*128"):
        kvjax_models.load(damaged)


def test_lost_files_are_noticed(damaged):
    (damaged / "orbax" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"orbax is not a whole Orbax checkpoint"):
        kvjax_models.load(damaged)


def test_lost_arrays_are_noticed(damaged):
    for folder in (damaged / "orbax").iterdir():
        if folder.name.startswith("ocdbt") or folder.name == "d":
            shutil.rmtree(folder)
    # In a process of its own: the reads that Orbax gives up on fail later still, in its threads, on stderr.
    program = """
import sys, kvjax_models
try:
    kvjax_models.load(sys.argv[1])
except ValueError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program, damaged], capture_output=True, text=True, check=False)
    assert "orbax is not a whole Orbax checkpoint" in result.stdout
