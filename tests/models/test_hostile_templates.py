"""Chat templates that grow, loop or fail: each is one error, soon, and the next one renders."""

import concurrent.futures
import os
import signal
import time

import pytest

from kvjax_models import template_process
from kvjax_models.chat_template import render_chat

HELLO = [{"role": "user", "content": "Hello"}]


def render(template, messages=HELLO):
    return render_chat(
        template, messages, add_generation_prompt=True, special_tokens={}, source="folder/chat_template.jinja"
    )


DOUBLED = "{% set n = namespace(s=" + "START" + ") %}{% for i in range(60) %}{% set n.s = DOUBLE %}{% endfor %}"
GROWING = [
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ [1] * 10**10 }}",
    "{{ [[1]] | tojson(indent=1000000000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ range(99999) | map('center', 100000) | list | length }}",
    "{{ raise_exception('x' * 10**9) }}",
    DOUBLED.replace("START", "'a'").replace("DOUBLE", "n.s ~ n.s"),
]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=1000000000) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    DOUBLED.replace("START", "(1,)").replace("DOUBLE", "(n.s, n.s)") + "{{ {n.s: 1} }}",
    DOUBLED.replace("START", "[1]").replace("DOUBLE", "[n.s, n.s]") + "{{ n.s }}",
    DOUBLED.replace("START", "7").replace("DOUBLE", "n.s * n.s"),
    "{{ x }}" * 50_000,
    "{% macro a() %}{% endmacro %}" * 8_000,
]
FAILING = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages[0].content + none }}": "can only concatenate str",
    "{{ range(10**9) }}": "Range too big",
    "{% break %}": "'break' outside loop",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recurses too deeply",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}": "recurses too deeply",
    "{{ " + "(" * 100_000 + " }}": "recurses too deeply",
    "{% if 1 %}" * 100 + "{% endif %}" * 100: "too many levels of indentation",
    "{{ 10**5000 }}": "4300 digits",
    "{% include 'x' %}": "no loader",
    "{% set ns = namespace(_a=1) %}": "must not begin with an underscore",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages[0].update(a=1) }}": "unsafe",
    "{{ missing.attribute }}": "'missing' is undefined",
    "{% generation %}": "endgeneration",
    "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}": "makes over 16,",
}


def refused(template, message, monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.1)
    with pytest.raises(ValueError, match=message) as error:
        render(template)
    assert str(error.value).startswith("folder/chat_template.jinja does not take these `messages`: ")
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("template", GROWING)
def test_a_template_that_grows_for_ever_is_refused(template, monkeypatch):
    monkeypatch.setattr(template_process, "MEMORY", 32 * 1024 * 1024)
    refused(template, r"takes over 33,\d+,\d+ bytes of memory", monkeypatch)


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_a_template_that_never_ends_is_refused(template, monkeypatch):
    refused(template, r"takes over 0\.\d+ s", monkeypatch)


@pytest.mark.parametrize(("template", "message"), FAILING.items(), ids=range(len(FAILING)))
def test_a_template_that_fails_is_refused(template, message, monkeypatch):
    refused(template, message, monkeypatch)


def test_long_chats_have_time_and_memory_in_proportion():
    words = "word " * 200_000
    chat = [{"role": "user", "content": words}] * 10
    template = "{% for m in messages %}{{ m.content | trim }}{{ m.content | tojson }}{% endfor %}"
    text = render(template, chat)
    assert text == (words.strip() + f'"{words}"') * 10


def test_templates_of_many_threads_and_after_a_fork_or_a_kill_do_not_mix():
    texts = [str(number) * 100 for number in range(40)]

    def content(text):
        return render("{{ messages[0].content }}", [{"role": "user", "content": text}])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(content, texts)) == texts
    process = template_process.PROCESS._process
    assert process is not None
    process.kill()
    process.wait()
    assert content("again") == "again"
    template_process.PROCESS._owner = -1  # As after a fork: the process is another's.
    ours, template_process.PROCESS._process = template_process.PROCESS._process, template_process.PROCESS._process
    assert content("child") == "child"
    assert template_process.PROCESS._process is not ours
    assert ours is not None
    assert ours.poll() is None
    ours.kill()
    ours.communicate()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs alarms")
def test_an_interrupt_ends_a_template(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 5.0)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            render(ENDLESS[0])
        assert time.monotonic() - start < 4
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render("b") == "b"
    assert os.getpid() == template_process.PROCESS._owner
