"""Text as it comes, with a tokenizer whose tokens are bytes or pieces of text."""

import pytest

from kvjax.text import TextStream


class Bytes:
    """Ids up to 255 are bytes; 256 is a special token."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return list(text.encode())

    def decode(self, ids, /, *, skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<end>"
        parts, run = [], bytearray()
        for token in [*ids, None]:
            if token is None or token > 255:
                parts.append(run.decode(errors="replace"))
                run = bytearray()
            if token is not None:
                parts.append(special) if token > 255 else run.append(token)
        return "".join(parts)


class Words:
    """SentencePiece's habit: a word brings its space, but the first word of a text does not."""

    def __init__(self, *words: str):
        self.words = words

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids, /, *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return "".join(self.words[token] for token in ids).removeprefix(" ")


def feed(stream: TextStream, ids) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return pieces


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "a🦋b", "e\u0301", "", "\n\n tabs\t"])
def test_pieces_add_up_to_the_text(text):
    stream = TextStream(Bytes())
    pieces = feed(stream, text.encode())
    assert "".join(pieces) + stream.finish() == text
    assert stream.text == text
    assert stream.finish() == ""


def test_a_character_is_shown_when_its_last_byte_comes():
    stream = TextStream(Bytes())
    assert feed(stream, "a🦋b".encode()) == ["a", "", "", "", "🦋", "b"]


def test_a_character_that_never_ends_is_shown_at_the_end():
    stream = TextStream(Bytes())
    assert feed(stream, b"ok\xf0\x9f") == ["o", "k", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.text == "ok\N{REPLACEMENT CHARACTER}"


def test_broken_bytes_in_the_middle_do_not_hold_up_the_text():
    stream = TextStream(Bytes())
    assert "".join(feed(stream, b"a\xffb\xfec")) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"


def test_spaces_between_words_stay():
    stream = TextStream(Words(" Hello", " big", " world", "!"))
    assert feed(stream, [0, 1, 2, 3]) == ["Hello", " big", " world", "!"]
    assert stream.finish() == ""


def test_special_tokens_are_not_text():
    stream = TextStream(Bytes())
    assert feed(stream, [104, 256, 105, 256]) == ["h", "", "i", ""]
    assert stream.finish() == ""
    assert stream.text == "hi"


def test_a_stop_string_ends_the_text_before_it():
    stream = TextStream(Bytes(), ["STOP"])
    pieces = feed(stream, b"go on STOP and more")
    assert stream.stopped
    assert len(pieces) == len("go on STOP")
    assert "".join(pieces) + stream.finish() == stream.text == "go on "


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_may_lie_across_any_border_of_tokens(cut):
    text = "ab\n\nQ: c"
    stream = TextStream(Words(text[:cut], text[cut:]), ["\n\nQ:"])
    pieces = feed(stream, [0, 1])
    assert stream.stopped
    assert "".join(pieces) + stream.finish() == "ab"


def test_text_that_may_begin_a_stop_string_is_held_back():
    stream = TextStream(Bytes(), ["###"])
    pieces = feed(stream, b"a#b##c")
    # Two characters are held back: they may be the first of "###".
    assert pieces == ["", "", "a", "#", "b", "#"]
    assert stream.finish() == "#c"
    assert not stream.stopped
    assert stream.text == "a#b##c"


def test_no_more_is_ever_shown_than_the_text_has_in_the_end():
    stop_strings = ["aab", "b!"]
    for text in ("aaaab", "ab!aab", "aaaa", "b", "baab!", "aa!b!"):
        ends = [text.find(s) for s in stop_strings if s in text]
        stream = TextStream(Bytes(), stop_strings)
        shown = ""
        for piece in feed(stream, text.encode()):
            shown += piece
            assert text[: min(ends, default=len(text))].startswith(shown)
        assert shown + stream.finish() == stream.text
        assert stream.stopped == bool(ends)


def test_of_two_stop_strings_in_one_token_the_earlier_counts():
    stream = TextStream(Words("one two three"), ["three", "two"])
    assert feed(stream, [0]) == ["one "]
    assert stream.stopped


def test_a_stop_string_that_only_the_end_completes_is_found():
    stream = TextStream(Bytes(), ["\N{REPLACEMENT CHARACTER}"])
    feed(stream, b"ok\xf0\x9f")
    assert not stream.stopped
    assert stream.finish() == ""
    assert stream.stopped
    assert stream.text == "ok"


def test_a_stop_string_of_several_bytes_a_character_is_found():
    stream = TextStream(Bytes(), ["。"])
    assert "".join(feed(stream, "はい。いいえ".encode())) == "はい"
    assert stream.stopped
