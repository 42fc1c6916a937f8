"""Builds the tokenizer that a GGUF file describes in its metadata."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.extras import extra
from kvjax.fields import Fields
from kvjax.files import reading
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_repair import set_around

# Names in templates and in the file's keys.
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # spelled so in the format
    "pad": "padding",
    "mask": "mask",
}
# SentencePiece's own limit is 16 characters by default, and 512 bytes for any word it learns from.
_LONGEST_PIECE = 512
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types that matter here
_SPACE = "▁"  # SentencePiece's visible space
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer: patterns that split a text one after another before its bytes are merged.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
}


class _Vocabulary(NamedTuple):
    """The tokens of a file, their types, and the id of each."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, file: pathlib.Path) -> Tokenizer | None:
    """Builds the tokenizer; None where the file has none.

    Args:
        metadata: the file's key-value pairs.
        file: the file, for messages.

    Raises:
        ValueError: the kind of tokenizer or its pre-tokenizer is not supported, or a key is missing or damaged.
    """
    fields = Fields(metadata, source=file, prefix="tokenizer.ggml.")
    model = fields.text("model", "none")
    if model in ("none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in builders:
        fields.fail("model", f"must be one of {list(builders)}")
    vocabulary = _vocabulary(fields)
    with reading(file, what="whole: its tokenizer is damaged"):
        with extra("text", purpose="A tokenizer (or `load(..., tokenizer=False)`)"):
            backend = builders[model](vocabulary, fields)
        _add_written_tokens(backend, vocabulary)
    # SentencePiece's texts begin with BOS, and so do Llama 3's.
    begins = model == "llama" or fields.text("pre", None) == "llama-bpe"
    special = {f"{name}_token": _special(fields, key, vocabulary) for name, key in _SPECIAL.items()}
    bos, eos = special["bos_token"], special["eos_token"]
    add_bos, add_eos = fields.flag("add_bos_token", begins), fields.flag("add_eos_token", False)
    set_around(backend, before=bos if add_bos else None, after=eos if add_eos else None)
    templates = Fields(metadata, source=file, prefix="tokenizer.")
    named = {name: templates.text(f"chat_template.{name}") for name in templates.texts("chat_templates", [])}
    return Tokenizer(
        backend,
        chat_template=templates.text("chat_template", named.pop("default", None)),
        named_templates=named,
        special_tokens={name: token for name, token in special.items() if token is not None},
        source=str(file),
        template_source=f"{file}: `tokenizer.chat_template`",
    )


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens, types = fields.texts("tokens"), fields.integers("token_type")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"{fields.source}: `tokenizer.ggml.tokens` must all differ, got {len(ids)} of {len(tokens)}.")
    if len(types) != len(tokens):
        raise ValueError(
            f"{fields.source}: `tokenizer.ggml.token_type` must have a value for each of the {len(tokens)} tokens, "
            f"got {len(types)}."
        )
    return _Vocabulary(tokens, types, ids)


def _byte_level(vocabulary: _Vocabulary, fields: Fields) -> Any:
    """GPT-2's kind: merges of bytes that are written as printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = fields.text("pre", "default")
    if name not in _SPLITS:
        fields.fail("pre", f"must be one of {list(_SPLITS)}")
    merges = fields.texts("merges")
    unpaired = next((merge for merge in merges if " " not in merge), None)
    if unpaired is not None:
        raise ValueError(f"{fields.source}: `tokenizer.ggml.merges` must be of two parts each, got {unpaired!r}.")
    merges = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is a token whole, even where merges lead elsewhere.
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=name == "llama-bpe")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: _Vocabulary, fields: Fields) -> Any:
    """SentencePiece's BPE: merges follow from the pieces' scores, unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = fields.integer("unknown_token_id", 0, at_most=len(vocabulary.tokens) - 1)
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_from_scores(vocabulary, fields),
        unk_token=vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefix = fields.flag("add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, fields: Fields) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first, then the longest left part."""
    scores = fields.take("scores")
    numbers = isinstance(scores, list) and all(type(score) in (int, float) and math.isfinite(score) for score in scores)
    if not numbers or len(scores) != len(vocabulary.tokens):
        fields.fail("scores", f"must be a finite number for each of the {len(vocabulary.tokens)} tokens")
    triples = zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
    normal = {token: score for token, score, kind in triples if kind == _NORMAL}
    lengths = {len(piece) for piece in normal}
    if lengths and max(lengths) > _LONGEST_PIECE:
        raise ValueError(
            f"{fields.source}: `tokenizer.ggml.tokens` must have at most {_LONGEST_PIECE} characters each, "
            f"got one of {max(lengths)}."
        )
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if cut in lengths and piece[:cut] in normal and piece[cut:] in normal
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _add_written_tokens(backend: Any, vocabulary: _Vocabulary) -> None:
    """Makes control and user-defined tokens be found in a text before anything else."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _special(fields: Fields, key: str, vocabulary: _Vocabulary) -> str | None:
    number = fields.integer(f"{key}_token_id", None)
    if number is None:
        return None
    if number >= len(vocabulary.tokens):
        fields.fail(f"{key}_token_id", f"must be below {len(vocabulary.tokens)}")
    return vocabulary.tokens[number]
