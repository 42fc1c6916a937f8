"""Tokenizer files and chat templates with random damage: each is read and used, or is one ValueError, soon."""

import contextlib
import json
import pathlib
import resource
import tempfile
import time

import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvjax_models import template_process
from kvjax_models.chat_template import render_chat
from kvjax_models.tokenizer_files import tokenizer_from_folder

FEW = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SECONDS, MEMORY = 2, 500 * 1024 * 1024
EXTREMES = ["-1", "0", "1e999", "NaN", str(2**31), str(2**64), "1" + "0" * 400, "null", "true", '""', "[]", "{}"]
TEMPLATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' and not loop.last %}{{ raise_exception("
    "'x') }}{% endif %}{% set ns.n = ns.n + 1 %}{{ bos_token ~ m.content | trim | tojson(indent=2) }}{{ '%5d' % 3 }}"
    "{% for i in range(3) %}{{ 'a' * 2 }}{% endfor %}{% endfor %}{{ 'b' | center(8) }}{{ ns.n ** 2 }}\n"
)


def _tokenizer_json() -> str:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "▁", "a", "b", "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("b", behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(16)
    backend.enable_padding(length=32)
    return backend.to_str()


FILES = {
    "tokenizer.json": _tokenizer_json(),
    "tokenizer_config.json": json.dumps(
        {
            "bos_token": {"content": "<s>", "special": True},
            "add_bos_token": True,
            "chat_template": TEMPLATE,
            "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "6": {"content": "<tool>"}},
        }
    ),
    "special_tokens_map.json": json.dumps({"bos_token": "<s>", "eos_token": {"content": "b"}}),
}


@st.composite
def damaged(draw, text: str) -> bytes:
    """A text with one to three damages: bytes flipped, cut, put in or repeated, numbers replaced, brackets nested."""
    content = text.encode()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "nest", "number", "repeat"]))
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        end = min(place + draw(st.integers(1, 40)), len(content))
        if kind == "flip":
            content = content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
        elif kind == "cut":
            content = content[:place] + content[end:]
        elif kind == "insert":
            piece = draw(st.sampled_from([*EXTREMES, "[", '"', "}", "{{", "%}", "|", "range(99999)", "'a' * 10**9"]))
            content = content[:place] + piece.encode() + content[place:]
        elif kind == "nest":
            content = content[:place] + draw(st.sampled_from([b"[", b"(", b"{% if 1 %}"])) * 5000 + content[place:]
        elif kind == "number":
            digits = [index for index, byte in enumerate(content) if 48 <= byte < 58]
            if digits:
                place = draw(st.sampled_from(digits))
                content = content[:place] + draw(st.sampled_from(EXTREMES)).encode() + content[place + 1 :]
        else:
            content = content[:end] + content[place:end] * 1000 + content[end:]
    return content


def read_tokenizer(folder: pathlib.Path) -> None:
    """Reads and uses the tokenizer of a folder."""
    tokenizer = tokenizer_from_folder(folder)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("a b ab<s> é" * 10))
        if tokenizer.chat_template is not None:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])


def render(template: str) -> str:
    """The text of a chat."""
    chat = [{"role": "user", "content": "Hello"}]
    return render_chat(template, chat, add_generation_prompt=True, special_tokens={"bos_token": "<s>"})


def _bounded(use, argument) -> None:
    """Uses a damaged thing; processor's time and memory are bounded, here and in the process that renders."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with contextlib.suppress(ValueError):
        use(argument)
    assert time.process_time() - start < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def test_the_whole_files_are_read():
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, {})
        read_tokenizer(pathlib.Path(folder))
        assert render(TEMPLATE) == '<s>"Hello"    3aaaaaa   b    1'


@FEW
@given(st.sampled_from(sorted(FILES)).flatmap(lambda name: st.tuples(st.just(name), damaged(FILES[name]))))
def test_damaged_tokenizer_files_are_read_or_refused(damage):
    name, content = damage
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, {name: content})
        _bounded(read_tokenizer, pathlib.Path(folder))


@FEW
@given(damaged(TEMPLATE))
def test_damaged_templates_are_rendered_or_refused(content):
    assert template_process.SECONDS + template_process.MEMORY / MEMORY < SECONDS
    _bounded(render, content.decode(errors="surrogateescape"))


def _write(folder: str, changed: dict[str, bytes]) -> None:
    for name, content in FILES.items():
        pathlib.Path(folder, name).write_bytes(changed.get(name, content.encode()))
