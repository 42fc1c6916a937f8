"""Examples have the asked length and depth, hold their answers, and come from their seed alone."""

import collections
import itertools
import re

import pytest

from kvjax.evaluation import TASKS, Experiment, contenders, fitted, prompt_parts
from kvjax.evaluation.tasks import CommonWords, FrequentWords, MultiKeyNeedle, MultiValueNeedle, VariableTracking
from kvjax.evaluation.text_windows import FORETOLD, TextWindows

HARDER = [
    *(MultiKeyNeedle(keys=9), MultiValueNeedle(values=4), VariableTracking(chains=2, hops=4)),
    *(CommonWords(common=5, share=0.08), FrequentWords(alpha=1.2, asked=3, size=6)),
]
ALL = [*TASKS.values(), *HARDER]


def name(task) -> str:
    return repr(task)


@pytest.fixture(params=["Words", "Chats"])
def tokenizer(request, small_run):
    return vars(small_run)[request.param]()


@pytest.mark.parametrize("task", ALL, ids=name)
def test_prompts_have_at_most_the_asked_length_and_nearly_that(task, tokenizer):
    for length, seed in itertools.product((700, 1501), (0, 7)):
        example, parts = fitted(task, tokenizer, length=length, depth=0.5, seed=seed)
        assert length - 30 <= parts.length <= length
        assert parts == prompt_parts(example, tokenizer)
        # Nothing is lost where the prompt is cut.
        assert tokenizer.decode(parts.context).endswith(tokenizer.decode(tokenizer.encode(example.context)[-5:]))
        assert tokenizer.decode(parts.question + parts.later).endswith(
            tokenizer.decode(tokenizer.encode(example.turns[-1].prefix))
        )
        assert bool(parts.later) == (len(example.turns) > 1)
        right = tokenizer.encode(example.turns[-1].reference)
        assert len(right) < parts.answer_tokens <= 2 * len(right) + 4


@pytest.mark.parametrize("task", ALL, ids=name)
def test_the_context_holds_the_answers_and_the_question_does_not(task):
    for seed in range(5):
        example = task.example(40, depth=0.3, seed=seed)
        asked = example.turns[-1]
        assert len(set(asked.answers)) == len(asked.answers)
        for answer in asked.answers:
            assert answer in example.context
            assert answer not in asked.question + asked.prefix
        assert task.score(asked.reference, asked.answers) == 1.0
        assert task.score("No idea.", asked.answers) == 0.0


@pytest.mark.parametrize("task", ALL, ids=name)
def test_the_seed_makes_the_example(task):
    assert task.example(30, depth=0.5, seed=3) == task.example(30, depth=0.5, seed=3)
    assert task.example(30, depth=0.5, seed=3) != task.example(30, depth=0.5, seed=4)
    # A longer text asks the same.
    assert task.example(30, depth=0.5, seed=3).turns == task.example(60, depth=0.5, seed=3).turns


@pytest.mark.parametrize("task", [task for task in ALL if task.has_depth], ids=name)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_needles_lie_at_the_asked_depth(task, depth, small_run):
    for seed in range(3):
        example, _ = fitted(task, small_run.Words(), length=1500, depth=depth, seed=seed)
        (answer,) = example.turns[-1].answers
        text = example.context.split("\n\n", 1)[1]
        before, _, after = text.partition(answer)
        assert answer not in after
        assert abs(len(before) / len(text) - depth) < 0.06


def test_multi_turn_asks_for_two_needles_of_the_text(small_run):
    example, parts = fitted(TASKS["multi-turn"], small_run.Words(), length=600, depth=0.5, seed=1)
    first, second = example.turns
    assert first.answers != second.answers
    assert first.answers[0] in example.context
    assert second.answers[0] in example.context
    # The first answer is given, the second is not.
    words = small_run.Words()
    parts = prompt_parts(example, words)
    assert " ".join(first.answers[0]) in words.decode(parts.later)
    assert " ".join(second.answers[0]) not in words.decode(parts.question + parts.later)


@pytest.mark.parametrize(("chains", "hops"), [(1, 1), (3, 4)])
def test_the_asked_variables_lead_to_the_value_and_no_others_do(chains, hops):
    example = VariableTracking(chains=chains, hops=hops).example(50, depth=0.0, seed=2)
    values: dict[str, str] = {}
    for variable, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", example.context):
        # A variable is assigned before it is used.
        values[variable] = source if source.isdigit() else values[source]
    (asked,) = re.findall(r"\d{5}", example.turns[0].question)
    assert {variable for variable, value in values.items() if value == asked} == set(example.turns[0].answers)
    assert len(values) == chains * (hops + 1)


@pytest.mark.parametrize("task", [CommonWords(), CommonWords(common=5, share=0.08), FrequentWords()], ids=name)
def test_the_asked_words_come_most_often(task):
    example = task.example(150, depth=0.0, seed=5)
    words = re.findall(r"\d+\. ([\w-]+)", example.context.rsplit("\n\n", 1)[1])
    counts = collections.Counter(words)
    answers = example.turns[0].answers
    assert {word for word, _ in counts.most_common(len(answers))} == set(answers)
    rest = max(count for word, count in counts.items() if word not in answers)
    assert min(counts[word] for word in answers) > rest


def test_a_length_that_holds_nothing_is_an_error(small_run):
    with pytest.raises(ValueError, match=r"`lengths` must be at least [0-9]+ tokens for the task 'needle', got 20"):
        fitted(TASKS["needle"], small_run.Words(), length=20, depth=0.5, seed=0)


def test_a_chat_template_that_rewrites_turns_is_an_error(small_run):
    class Rewriting(small_run.Chats):
        def apply_chat_template(self, messages, *, add_generation_prompt=True):
            return f"{len(messages)} " + super().apply_chat_template(messages)

    with pytest.raises(ValueError, match="has a chat template that rewrites earlier turns"):
        prompt_parts(TASKS["multi-turn"].example(5, depth=0.5, seed=0), Rewriting())


def test_stretches_of_a_text_have_their_length_and_differ(small_run):
    words = small_run.Words()
    text = " ".join(f"{number} apples." for number in range(100, 400))
    experiment = Experiment(contenders=contenders({"full": small_run.kvjax.Full()}, ()), tasks=("perplexity",))
    windows = TextWindows(text, words, longest=300)
    first, second = (windows.window(experiment, case._replace(length=200)) for case in experiment.cases(1000)[:2])
    assert len(first.context) + len(first.continuation) == 200
    assert len(first.continuation) == FORETOLD
    assert first != second
    with pytest.raises(ValueError, match="`text` must have at least as many tokens as the longest prompt, 9999, got"):
        TextWindows(text, words, longest=9999)
