"""Builds the tokenizer that a GGUF file describes in its metadata."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.extras import extra
from kvjax_models.tokenizer import Tokenizer

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


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, file: pathlib.Path) -> Tokenizer | None:
    """Builds the tokenizer; None where the file has none.

    Args:
        metadata: the file's key-value pairs.
        file: the file, for messages.

    Raises:
        ValueError: the kind of tokenizer or its pre-tokenizer is not supported, or a key is missing.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in builders:
        raise ValueError(f"{file}: `tokenizer.ggml.model` must be one of {list(builders)}, got {model!r}.")
    keys = ("tokens", "token_type", "merges" if model == "gpt2" else "scores")
    for key in (f"tokenizer.ggml.{key}" for key in keys):
        if key not in metadata:
            raise ValueError(f"{file}: `{key}` is missing.")
    backend = _build(builders[model], metadata, file)
    _add_written_tokens(backend, metadata)
    # SentencePiece's texts begin with BOS, and so do Llama 3's.
    begins = model == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    bos, eos = _special(metadata, "bos"), _special(metadata, "eos")
    _add_around(
        backend,
        before=bos if metadata.get("tokenizer.ggml.add_bos_token", begins) else None,
        after=eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, chat_template=template, bos_token=bos, eos_token=eos)


def _build(builder: Callable[..., Any], metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
    tokens = metadata["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{file}: `tokenizer.ggml.tokens` must all differ, got {len(set(tokens))} of {len(tokens)}.")
    try:
        with extra("text", purpose="A tokenizer (or `load(..., tokenizer=False)`)"):
            return builder(metadata, file)
    except (ImportError, ValueError):
        raise
    except Exception as error:  # The package raises nothing narrower.
        raise ValueError(f"{file}: its tokenizer is damaged: {error}") from error


def _byte_level(metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
    """GPT-2's kind: merges of bytes that are written as printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ValueError(f"{file}: `tokenizer.ggml.pre` must be one of {list(_SPLITS)}, got {name!r}.")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is a token whole, even where merges lead elsewhere.
    model = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=name == "llama-bpe")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[name]]
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], file: pathlib.Path) -> Any:
    """SentencePiece's BPE: merges follow from the pieces' scores, unknown characters become bytes."""
    del file
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    model = models.BPE(
        vocab=_vocabulary(metadata),
        merges=_merges_from_scores(tokens, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]),
        unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first, then the longest left part."""
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _add_written_tokens(backend: Any, metadata: Mapping[str, Any]) -> None:
    """Makes control and user-defined tokens be found in a text before anything else."""
    from tokenizers import AddedToken

    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in kinds
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _add_around(backend: Any, *, before: str | None, after: str | None) -> None:
    """Sets what `add_special_tokens` puts before and after a text."""
    from tokenizers.processors import TemplateProcessing

    around = [token for token in (before, after) if token is not None]
    if around:
        single = [*([before] if before else []), "$A", *([after] if after else [])]
        special = [(token, backend.token_to_id(token)) for token in around]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=special)


def _special(metadata: Mapping[str, Any], name: str) -> str | None:
    number, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata["tokenizer.ggml.tokens"]
    if number is None:
        return None
    if number >= len(tokens):
        raise ValueError(f"`tokenizer.ggml.{name}_token_id` must be below {len(tokens)}, got {number}.")
    return tokens[number]
