"""A template of a stranger costs a bounded amount of work, and its failures are those of the record."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from shardkit.errors import RecipeError
from shardkit.tokens.chat import ChatError, ChatFormat, compile_template, render_chat
from shardkit.tokens.chat_template import ChatTemplate
from shardkit.tokens.chat_work import Work

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def render(template: str, talk: Any = TALK, variables: Any = None) -> str:
    return render_chat(
        ChatFormat(template, ("<|x|>",), {}, "<|x|>"), talk, None, variables, train_on="all"
    ).text


TOO_MUCH = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9**(9**7) }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "times": "{{ 'a' * 3000000000 }}",
    "times, turned": "{{ 3000000000 * 'a' }}",
    "list": "{{ ([1, 2] * 300000000)|length }}",
    "center": "{{ 'a'|center(2000000000) }}",
    "center, method": "{{ 'a'.center(2000000000) }}",
    "ljust": "{{ messages[0].content.ljust(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "to_bytes": "{{ (5).to_bytes(2000000000, 'big') }}",
    "format": "{{ '{:2000000000}'.format('a') }}",
    "format, argument": "{{ '{:{}}'.format('a', 2000000000) }}",
    "percent": "{{ '%2000000000d' % 1 }}",
    "percent, argument": "{{ '%*d' % (2000000000, 1) }}",
    "percent, filter": "{{ '%2000000000d'|format(1) }}",
    "indent": "{{ ('a\n' * 10000)|indent(100000) }}",
    "tojson": "{{ messages|tojson(indent=1000000000) }}",
    "separators": "{{ [1, 2]|tojson(separators=('a' * 1000, ':')) }}",
    "batch": "{{ [1]|batch(2000000000, 'x')|list }}",
    "round": "{{ 1.5|round(2000000000, 'ceil') }}",
    "sum": "{{ [[1], [2]]|sum(start=[]) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joining": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
    "joining, method": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "replacing": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "replacing, filter": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == 1 }}",
    "objects of objects": "{% set ns = namespace(x={}) %}{% for i in range(99) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "blocks": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "text in a block": "{% set x %}{% for i in range(99999) %}" + "a" * 50_000 + "{% endfor %}{% endset %}",
    "output": "{% set x = 'a' * 1000000 %}{% for i in range(3000) %}{{ x }}{% endfor %}",
    "widths of a name": "{{ '{:>{w}}'.format('a', w=2000000000) }}",
    "widths of an object": "{{ '{:>{w[0]}}'.format('a', w=[2000000000]) }}",
    "widths of a map": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 2000000000}) }}",
    "comparing": "{% set x = 'a' * 8000000 %}{% set y = 'a' * 8000000 %}"
    "{% for i in range(99999) %}{{ 1 if x < y }}{% endfor %}",
    "comparing by a test": "{% set x = 'a' * 8000000 %}{% set y = 'a' * 8000000 %}"
    "{% for i in range(99999) %}{{ 1 if x is eq(y) }}{% endfor %}",
    "searching": "{% set x = 'a' * 8000000 %}{% for i in range(99999) %}{{ 1 if 'b' in x }}{% endfor %}",
    "searching a range": "{% for i in range(99999) %}{{ 1 if 'b' in range(99999) }}{% endfor %}",
    "greatest": "{% for i in range(99999) %}{{ range(99999)|max }}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{% set x = range(9999)|sort %}{% endfor %}",
    "dividing": "{% set x = 7 ** 1000000 %}{% for i in range(99999) %}{% set y = x // 3 %}{% endfor %}",
    "doubling by minus": "{% set ns = namespace(x=1) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "splitting": "{% set x = 'a,' * 5000000 %}{% for i in range(99) %}{% set y = x.split(',') %}{% endfor %}",
    "macro": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "two macros": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(template, id=name, marks=[] if number % 3 == 0 else pytest.mark.extended)
        for number, (name, template) in enumerate(TOO_MUCH.items())
    ],
)
def test_what_has_no_bound_is_refused_by_count_before_it_takes_memory(template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatError) as refused:
        render(template)
    assert refused.value.reason == "template_limit"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "KiB"


FAILURES = {
    "{{ 1/0 }}": "ZeroDivisionError: division by zero",
    "{{ 2.0**10000 }}": "OverflowError",
    "{% for i in range(1000000) %}{% endfor %}": "Range too big",
    "{{ '\\ud800' }}": "UnicodeEncodeError",
    "{{ messages[0].nothing.more }}": "has no attribute 'nothing'",
    "{{ messages[0] + 1 }}": "TypeError",
    "{% include 'x' %}": "no loader",
    "{{ '%d' % 'a' }}": "TypeError",
    "{{ {}['a'].b }}": "no attribute",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ('9' * 5000)|int * 1 ~ '' ~ 10**4400 }}": "ValueError",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ strftime_now('%Y') }}": "chat_template_kwargs",
}


@pytest.mark.parametrize(("template", "problem"), FAILURES.items())
def test_what_a_template_raises_is_the_records_refusal(template: str, problem: str) -> None:
    with pytest.raises(ChatError, match=problem) as refused:
        render(template)
    assert refused.value.reason == "bad_messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if a %}" * 300 + "{% endif %}" * 300,
        "{{ \ud800 }}",
        "{% for m in messages %}",
        "{{ messages|random }}",
        "{{ messages|no_such }}",
        "{% generation %}",
    ],
)
def test_a_template_that_cannot_be_compiled_is_an_error_of_the_recipe(template: str) -> None:
    with pytest.raises(RecipeError, match=r"tokenizer\.chat_template"):
        compile_template(template)


def test_usual_widths_and_long_texts_are_within_the_limits() -> None:
    long = [{"role": "user", "content": "word " * 200_000}]
    assert len(render("{% for m in messages %}{{ m.role ~ m.content|trim }}{% endfor %}", long)) == 1_000_003
    assert render("{{ 'a'|center(5) }}{{ '%05d' % 7 }}{{ [1]|tojson(indent=1) }}") == "  a  00007[\n 1\n]"
    assert render("{{ '{:>4}'.format(1) }}{{ 2 ** 10 }}{{ ['a', 'b']|join(', ') }}") == "   11024a, b"


def test_time_never_drops_a_record_but_stops_the_build() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}")
    work = Work(0, seconds=0.0)
    time.sleep(0.01)
    with pytest.raises(RecipeError, match="depend on the speed of this machine"):
        list(template.chunks(work, {}))


def test_variables_come_from_the_recipe_and_before_them_from_the_record() -> None:
    chat = ChatFormat(
        "{{ a }}{{ b }}{{ documents }}", ("<|x|>",), {}, "<|none|>", variables={"a": 1, "b": "<|x|>"}
    )
    assert render_chat(chat, TALK, train_on="all").text == "1<|x|>None"
    rendered = render_chat(chat, TALK, None, {"a": "<|x|>", "documents": [1]}, train_on="all")
    assert rendered.text == "<|x|><|x|>[1]"
    flags = [flags & 1 for _, flags in parts(rendered)]
    assert flags == [0, 1, 0], "what a record spells stays text, unlike what the recipe says"
    other = ChatFormat(chat.template, chat.specials, {}, "<|none|>", variables={"a": 2, "b": "<|x|>"})
    assert chat.content != other.content


def parts(rendered: Any) -> list[tuple[str, int]]:
    from shardkit.tokens.chat import parts_of

    return parts_of(rendered.text, rendered.marks)


def test_a_date_is_that_of_the_recipe() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    assert render(template, variables={"strftime_now": "2024-07-26"}) == "26 Jul 2024"
    for given in ("today", 5, None):
        with pytest.raises(ChatError, match="not a date such as 2026-01-31"):
            render(template, variables={"strftime_now": given})


@pytest.mark.parametrize(
    "given", [[1], "x", 5, {"messages": []}, {"tools": 1}, {"add_generation_prompt": True}]
)
def test_variables_that_are_none_or_the_conversations_own_are_refused(given: Any) -> None:
    with pytest.raises(ChatError, match="chat_template_kwargs"):
        render("{{ a }}", variables=given)
