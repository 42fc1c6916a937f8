"""Chat templates: the texts that transformers renders."""

import json
import pathlib

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from kvjax_models.tokenizer import Tokenizer

SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "sep_token": "<sep>",
    "cls_token": "<cls>",
    "mask_token": "<mask>",
    "image_token": "<img>",
}
HELLO = [{"role": "user", "content": "Hi <é> 'q' \"d\""}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]

# Templates, messages, variables, and the texts that transformers 5.24.0 renders of them, asking for an answer.
TEXTS = json.loads(pathlib.Path(__file__).with_name("chat_texts.json").read_text(encoding="utf-8"))


def tokenizer(**settings):
    return Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])), special_tokens=SPECIAL, **settings)


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case["template"][:30])
def test_texts_are_those_of_transformers(case):
    template, messages, variables = case["template"], case["messages"], case["variables"]
    assert tokenizer(chat_template=template).apply_chat_template(messages, **variables) == case["text"]
    # Given as an argument, a template does the same.
    assert tokenizer().apply_chat_template(messages, chat_template=template, **variables) == case["text"]


def test_a_named_template_is_used_by_its_name_or_for_tools():
    chat = tokenizer(chat_template="D", named_templates={"tool_use": "T", "rag": "R"})
    assert chat.apply_chat_template(HELLO) == "D"
    assert chat.apply_chat_template(HELLO, chat_template="default") == "D"
    assert chat.apply_chat_template(HELLO, tools=TOOLS) == "T"
    assert chat.apply_chat_template(HELLO, chat_template="rag", tools=TOOLS) == "R"
    assert chat.apply_chat_template(HELLO, chat_template="{{ eos_token }}") == "</s>"


def test_values_of_other_kinds_reach_a_template_as_plain_ones():
    chat = tokenizer(chat_template="{{ x }} {{ y }} {{ z is true }} {{ z.__class__ }}{{ n }}")
    text = chat.apply_chat_template(HELLO, x=np.float32(0.5), y=np.arange(2), z=np.bool_(True), n=np.str_("n"))
    assert text == "0.5 <ndarray> True n"
    assert tokenizer(chat_template="{{ x }}").apply_chat_template(HELLO, x=(1, [2])) == "(1, [2])"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenize": True}, "`tokenize` is not taken here"),
        ({"continue_final_message": True}, "`continue_final_message` is not taken here"),
        ({"tools": "f"}, "`tools` must be a list of dictionaries, got 'f'"),
        ({"documents": [1]}, r"`documents` must be a list of dictionaries, got \[1\]"),
    ],
)
def test_arguments_that_a_template_cannot_take_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tokenizer(chat_template="D").apply_chat_template(HELLO, **arguments)
    assert tokenizer(chat_template="D").apply_chat_template(HELLO, tokenize=False, max_length=None) == "D"


def test_contents_may_be_parts_or_missing_beside_calls():
    chat = tokenizer(chat_template="{{ messages | length }}")
    for message in (
        {"role": "user", "content": [1]},
        {"role": "user", "content": 1},
        {"role": "user", "tool_calls": []},
    ):
        with pytest.raises(ValueError, match=r"`messages\[0\]` must have a string under 'content', or a list of parts"):
            chat.apply_chat_template([message])
    nested: list = []
    nested.append(nested)
    with pytest.raises(ValueError, match="`x` must not be nested over 100 deep"):
        chat.apply_chat_template(HELLO, x=nested)
