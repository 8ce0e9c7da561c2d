"""Can a chat template, or a message in it, reach anything, run for ever or fill the memory?"""

import json
import resource
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.frontend.prompt import chat_template as templates
from penstock.frontend.prompt.chat_template import ChatTemplate, TemplateFailed, TemplateSlow
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher
from penstock.frontend.prompt.prompt_tokenizer import builtin_folder, load_tokenizer
from penstock.frontend.prompt.request_body import parse
from penstock.frontend.prompt.template_sandbox import ONE_MAX, SOURCE_MAX, BoundedEnvironment
from tests.depth import deep

HELLO = [{"role": "user", "content": "hello"}]


def many(body: str, times: int = 99_999) -> str:
    return "{% for i in range(" + str(times) + ") %}" + body + "{% endfor %}"


def growing(step: str, start: str = "'a'") -> str:
    """Do a step to ``ns.x`` sixty times."""
    return "{% set ns = namespace(x=" + start + ") %}" + many(step, 60)


def assigned(value: str, start: str = "'a'") -> str:
    return growing("{% set ns.x = " + value + " %}", start)


ENDLESS = {
    "loop in a loop": many(many("")),
    "loop over a list": "{% set l = range(5000)|list %}{% for a in l %}{% for b in l %}"
    "{% for c in l %}{% endfor %}{% endfor %}{% endfor %}",
    "captured": "{% set x %}" + many(many(".")) + "{% endset %}",
    "macro": "{% macro m(n) %}" + many("{% if n %}{{ m(n - 1) }}{% endif %}", 9) + "{% endmacro %}{{ m(99) }}",
    "recursive loop": "{% for x in [0, 0] recursive %}{% if loop.depth < 60 %}{{ loop([0, 0]) }}{% endif %}"
    "{% endfor %}",
    "filters of a filter": many("{{ range(99999)|map('string')|map('upper')|list|length }}"),
    "sorting": many("{{ range(99999)|sort(reverse=true)|first }}"),
    "wrapping": many("{{ ('a b ' * 9999)|wordwrap(3)|length }}"),
}
GREEDY = {
    "text times number": "{{ 'a' * 10 ** 9 }}",
    "number times text": "{{ 10 ** 9 * 'a' }}",
    "list times number": "{{ [0] * 10 ** 9 }}",
    "tower": "{{ 10 ** (10 ** 8) }}",
    "product of towers": assigned("ns.x * ns.x", "10"),
    "doubled by +": assigned("ns.x + ns.x"),
    "doubled by ~": assigned("ns.x ~ ns.x"),
    "doubled list": assigned("ns.x + ns.x", "[1]"),
    "doubled by capture": growing("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubled by a macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + assigned("d(ns.x)"),
    "replaced": assigned("ns.x.replace('a', 'aaaaaaaa')"),
    "replace filter": assigned("ns.x|replace('a', 'aaaaaaaa')"),
    "joined": "{{ 'a'.join(range(99999)|map('string')) ~ ('b' * 10 ** 6).join(['c'] * 99999) }}",
    "join filter": "{{ range(99999)|join('a' * 10 ** 6) }}",
    "sum of lists": "{{ ([[1] * 10 ** 6] * 99999)|sum(start=[]) }}",
    "kept pieces": "{% set ns = namespace(l=[]) %}" + many("{% set ns.l = ns.l + ['a' * 10 ** 6 ~ i] %}"),
    "captured pieces": "{% set x %}" + many("{{ 'a' * 10 ** 6 ~ i }}") + "{% endset %}",
    "center filter": "{{ 'a'|center(10 ** 9) }}",
    "indent filter": "{{ 'a\n' * 10 ** 6 |indent(10 ** 6) }}",
    "indent by text": "{{ ('a\n' * 10 ** 6)|indent('b' * 10 ** 6) }}",
    "links": "{{ ('www.a.b ' * 9999)|urlize|length }}",
    "batch filter": "{{ [1]|batch(10 ** 9, 0)|list }}",
    "slice filter": "{{ [1]|slice(10 ** 9)|list }}",
    "round filter": "{{ 1.5|round(10 ** 9) }}",
    "truncate filter": "{{ 'a'|truncate(10 ** 9, end='b' * 10 ** 7) }}",
    "tojson filter": "{{ messages|tojson(indent=10 ** 9) }}",
    **{
        f"{name} method": "{{ '1\t'." + name + "(10 ** 9) }}"
        for name in ("ljust", "rjust", "center", "zfill", "expandtabs")
    },
    "taken method": "{% set f = 'a'.ljust %}{{ f(10 ** 9) }}",
    "printf": "{{ '%999999999d' % 1 }}",
    "printf of an argument": "{{ '%*d' % (999999999, 1) }}",
    "printf precision": "{{ '%.999999999f' % 1.0 }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "format method": "{{ '{:999999999d}'.format(1) }}",
    "format of an argument": "{{ '{:{}d}'.format(1, 999999999) }}",
    "format map": "{{ '{a:999999999d}'.format_map({'a': 1}) }}",
    "date": "{{ strftime_now('%999999999Y') }}",
    "long date": "{{ strftime_now('%Y' * 10 ** 7) }}",
    "constant": "{% if false %}{{ 'a'|center(10 ** 9) }}{% endif %}{{ ('x' * 10 ** 9)|length }}",
}
ESCAPES = {
    "name of a method": "{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}",
    "environment": "{{ environment }}{{ context }}{{ concat }}{{ resolve }}",
    "of the loop": "{% for m in messages %}{{ loop._iterator }}{{ loop.__init__.__globals__ }}{% endfor %}",
    "of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__ }}{{ m._func.__globals__ }}{{ m._environment.step }}",
    "of a caller": "{% macro m() %}{{ caller._func.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "of a generator": "{{ (messages|map('string')).gi_frame.f_globals }}",
    "of a format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "of a format map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "by a filter": "{{ messages|map(attribute='__class__')|map(attribute='__mro__')|list }}",
    "by sorting": "{{ [namespace]|sort(attribute='__init__.__globals__')|first }}",
    "by grouping": "{{ messages|groupby('__class__')|list }}",
    "by joining": "{{ messages|join(',', attribute='__class__') }}",
    "by adding up": "{{ messages|sum(attribute='__class__') }}",
    "another template": "{% include 'x' %}",
    "another's macros": "{% from 'x' import y %}",
    "blocks": "{% block a %}{{ self.a.__func__.__globals__ }}{{ self._TemplateReference__context }}{% endblock %}",
    "undefined": "{{ nothing.__class__ }}{{ nothing._fail_with_undefined_error }}",
    "the date's": "{{ strftime_now.__module__ }}{{ strftime_now.__kwdefaults__ }}",
    "cycler": "{{ cycler.__init__.__globals__.__builtins__ }}{{ joiner.__init__ }}{{ namespace.__init__ }}",
    "changing": "{{ messages.append(1) }}{{ messages[0].update(role='x') }}{{ messages.clear() }}",
}


RENDER = """
import json, os, resource, signal, sys, traceback
from penstock.frontend.prompt import chat_template

def rendered(source):
    try:
        template = chat_template.ChatTemplate(source)
        return f"made {len(template.render([{'role': 'user', 'content': 'hello'}], seconds=chat_template.SECONDS))}"
    except chat_template.TemplateFailed as error:
        return f"{type(error).__name__} {error}"

sources, chat_template.SECONDS = json.load(sys.stdin)
for name, source in sources.items():
    if (child := os.fork()) == 0:
        try:
            signal.alarm(60)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            print(json.dumps({name: rendered(source)[:200]}), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if status := os.waitpid(child, 0)[1]:
        print(json.dumps({name: f"its process ended with {status}"}), flush=True)
"""


def render_apart(sources: dict[str, str], seconds: float) -> dict[str, str]:
    """Render each in a process of its own that may have little memory, and be killed; return how each ended."""
    done = subprocess.run(
        [sys.executable, "-c", RENDER],
        input=json.dumps([sources, seconds]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ended = {name: end for line in done.stdout.splitlines() for name, end in json.loads(line).items()}
    assert ended.keys() == sources.keys(), done.stderr[-2000:]
    return ended


def test_an_endless_template_ends() -> None:
    ended = render_apart(ENDLESS, seconds=0.2)
    faults = [f"{name}: {end}" for name, end in ended.items() if not end.startswith("TemplateSlow")]
    assert not faults, "\n".join(faults)


def test_a_greedy_template_is_stopped_before_it_has_filled_the_memory() -> None:
    ended = render_apart(GREEDY, seconds=20.0)
    faults = [f"{name}: {end}" for name, end in ended.items()
              if not end.startswith("TemplateFailed") or "MemoryError" in end]  # fmt: skip
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_outside_is_reached(name: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        found = ChatTemplate(ESCAPES[name]).render(messages)
    except TemplateFailed:
        found = ""
    for word in ("class", "function", "module", "built-in", "object at", "Environment", "method", "globals"):
        assert word not in found, found
    assert messages == HELLO


def test_a_huge_or_deep_source_is_refused() -> None:
    for source in (
        "x" * (SOURCE_MAX + 1),
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "(" * 20_000 + ")" * 20_000,
    ):
        with pytest.raises(TemplateFailed):
            ChatTemplate(source)


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% include '/etc/passwd' %}", "%999999999d", "{:999999999d}", "\x00\ud800", "{" * 500]
)
def test_a_message_is_only_ever_data(text: str) -> None:
    found = ChatTemplate("{% for m in messages %}{{ m.content }}|{{ m.content | trim }}{% endfor %}").render(
        [{"role": "user", "content": text}]
    )
    assert found.startswith(f"{text}|")


def test_what_a_request_passes_to_the_template_can_not_take_its_tools_away() -> None:
    source = "{{ raise_exception('refused') }}"
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render(
            HELLO, kwargs={"raise_exception": "x", "environment": {}, "messages": [], "range": 1}
        )
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateFailed):
        ChatTemplate("{{ x | tojson }}").render(HELLO, kwargs={"x": deep})


async def test_a_template_that_is_always_slow_is_given_up_and_the_loop_goes_on(monkeypatch, caplog) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    monkeypatch.setattr("penstock.frontend.prompt.prompt_hashing.SECONDS", 0.2)
    tokenizer = load_tokenizer("builtin:sim")
    tokenizer.template = ChatTemplate(ENDLESS["loop in a loop"])
    prompts = PromptHasher(2, 10, lambda stage, took: None)
    parsed = parse("chat_completions", json.dumps({"model": "m", "messages": HELLO}).encode())
    hashing = BlockHashing(block_size=4, text_block_bytes=64)
    for number in range(6):
        found = await prompts.prepare(parsed, tokenizer, hashing)
        assert found.isl > 0 and tokenizer.template.given_up == (number >= 2)
    assert prompts.template_failures == 3 and caplog.text.count("too slow") == 1
    prompts.close()


def test_a_short_budget_is_no_verdict() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}")
    for _ in range(5):
        with pytest.raises(TemplateSlow):
            template.render(HELLO, seconds=0.001)
    assert not template.given_up


def test_several_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    wrong: list[object] = []

    def render(text: str) -> None:
        for _ in range(200):
            if template.render([{"role": "user", "content": text}] * 20) != text * 20:
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- the limits change nothing else -----------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "{{ m.role }}",
        "{{ m['content'] | trim }}",
        "{{ '<|' + m.role + '|>' + m.content + '\n' }}",
        "{{ '<' ~ m.role ~ loop.index ~ '>' }}",
        "{{ m | tojson }}",
        "{% if loop.first %}first{% elif loop.last %}last{% else %}{{ loop.index0 }}{% endif %}",
        "{% if 'a' in m.content and not loop.last %}{{ m.content | upper | replace('A', 'bb') }}{% endif %}",
        "{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}",
        "{{ m.content.split('a')[-1].lstrip('\n') }}",
        "{{ m.content[:3] }}{{ m.content[-1:] }}",
        "{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ m.content | default('none', true) | indent(4) }}",
        "{{ [1, 2, 3] | sum }}{{ [m.role, 'x'] | join('-') }}{{ (2 ** 3) * 2 % 5 }}",
        "{{ '%s is %d' % (m.role, loop.index) }}{{ '{}:{:>5}'.format(m.role, loop.index) }}",
        "{% set part %}{{ m.role }}{{ m.content }}{% endset %}{{ part | length }}{{ part }}",
        "{{ say(m.role) }}",
        "{{ m.items() | sort | list }}{{ m | dictsort | first | first }}",
        "{{ m.content is string }}{{ m.missing is defined }}{{ m.missing }}",
        "{{ '-' * 5 }}{{ [0] * 3 }}{{ m.content.startswith('a') }}{{ m.content | length * 2 }}",
    ]
)
HEAD = "{% macro say(x) %}[{{ x }}]{% endmacro %}{% set ns = namespace(seen=0) %}"


@settings(max_examples=deep(80))
@given(
    st.lists(PIECES, max_size=8),
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=12)), max_size=4),
)
def test_ordinary_templates_come_out_as_from_the_library(pieces: list[str], chat: list[tuple[str, str]]) -> None:
    source = HEAD + "{% for m in messages %}" + "".join(pieces) + "{% endfor %}"
    messages = [{"role": role, "content": content} for role, content in chat]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = templates._tojson
    bounded = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded.add_filter("tojson", templates._tojson)
    bounded.allow(60)
    assert bounded.from_string(source).render(messages=messages) == plain.from_string(source).render(messages=messages)


def test_the_largest_chat_that_fits_a_body_is_no_trouble() -> None:
    text = "word " * (6 << 20)
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% endfor %}")
    started = time.process_time()
    assert len(template.render([{"role": "user", "content": text}])) > 31_000_000 < ONE_MAX
    assert time.process_time() - started < templates.SECONDS and resource.RLIMIT_AS
    folder = builtin_folder("builtin:sim")
    assert (folder / "tokenizer_config.json").exists()
