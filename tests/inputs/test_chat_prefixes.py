"""Masks that are derived in linear time are those that the definition gives, whatever a template reads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.tokens.chat import MARK, TRAINED, ChatError, ChatFormat, render_chat
from shardkit.tokens.chat_prefixes import Prefixes
from shardkit.tokens.chat_work import Work
from support.chat_reference import answers_of

EOS = "<|endoftext|>"
SPECIALS = ("<|s|>", "<|e|>", EOS)
TURN = "<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n"
PROMPT = "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT

# What templates do before, in and after their loop over messages; each reads or keeps something else.
BEFORE = [
    "",
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}",
    "{% set ns = namespace(n=0, seen='') %}",
    "{% set ns = namespace(n=messages|length) %}",
    "{% set ns = namespace(n=messages[-1].content, inner=namespace(n=0)) %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{% set count = ns.n %}{% set ns.n = 0 %}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.n %}"
    "{% set ns.n = loop.revindex0 %}{% endif %}{% endfor %}",
    "{% set users = messages|selectattr('role', 'equalto', 'user') %}",
    "{% set users = messages|selectattr('role', 'equalto', 'user')|list %}",
    "{% set c = cycler('x', 'y') %}",
    "{% macro show(all) %}{{ all|length }}{% endmacro %}",
]
IN = [
    TURN,
    "{% if loop.last %}!{% endif %}" + TURN,
    "{% if not loop.last %}" + TURN + "{% else %}{{ m.content }}<|e|>{% endif %}",
    "{% if loop.changed(m.role) %}#{% endif %}" + TURN,
    "{{ loop.index }}{{ loop.previtem.role if loop.previtem is defined }}" + TURN,
    "{{ loop.nextitem.role if loop.nextitem is defined }}" + TURN,
    "{% if messages[loop.index0 + 2] is defined %}+{% endif %}" + TURN,
    "{% if ns is defined %}{% set ns.n = (ns.n ~ '1')|length %}{{ ns.n }}{% endif %}" + TURN,
    "{% if ns is defined %}{% set ns.kept = m %}{{ ns.n }}{% endif %}" + TURN,
    "{% if ns is defined %}{% set ns.rest = messages[loop.index:] %}{% endif %}" + TURN,
    "{% if ns is defined and ns.rest is defined %}{{ ns.rest|length }}{% endif %}"
    "{% if ns is defined %}{% set ns.rest = messages[1:] %}{% endif %}" + TURN,
    "{% set mine = namespace(x=loop.index) %}{% if ns is defined %}{% set ns.mine = mine %}{% endif %}"
    + TURN,
    "{% if m.role == 'system' %}{% continue %}{% endif %}" + TURN,
    "{% if loop.index > 3 %}{% break %}{% endif %}" + TURN,
    "{% if users is defined %}{{ users|first is defined }}{% endif %}" + TURN,
    "{% if c is defined %}{{ c.next() }}{% endif %}" + TURN,
    "{% if count is defined %}{{ count }}{% endif %}" + TURN,
    "{% if show is defined %}{{ show(messages) }}{% endif %}" + TURN,
    "{% for other in messages %}{% if other is sameas m %}{{ loop.index }}{% endif %}{% endfor %}" + TURN,
    "{{ loop.length if m.role == 'tool' }}" + TURN,
    "{% if add_generation_prompt and loop.last %}?{% endif %}" + TURN,
    "{{ messages|tojson if m.role == 'tool' }}" + TURN,
]
AFTER = [
    "",
    "{% if messages[-1].role == 'user' %}.{% endif %}",
    "{% if ns is defined %}{{ ns.n }}{% endif %}",
    "{% for m in messages %}{% if loop.first %}{{ m.role }}{% endif %}{% endfor %}",
    "{% if not add_generation_prompt %}" + EOS + "{% endif %}",
]
TEMPLATES = st.builds(
    lambda before, inside, after, more: (
        f"{before}{{% for m in messages %}}{inside}{{% endfor %}}{more}{after}{PROMPT}"
    ),
    st.sampled_from(BEFORE),
    st.sampled_from(IN),
    st.sampled_from(AFTER),
    st.sampled_from(["", "{% for m in messages %}{% if loop.last %}{{ m.role }}{% endif %}{% endfor %}"]),
)
TALKS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "assistant", "system", "tool"]),
        st.sampled_from(["a", " b ", "x\ny", "", "1"]),
    ),
    min_size=1,
    max_size=9,
)


def spans_of(marks: bytes) -> list[tuple[int, int]]:
    """Where bytes are trained on, neighbors joined."""
    table = np.frombuffer(marks, MARK)
    flags = np.repeat(table["flags"] & TRAINED > 0, table["bytes"])
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    covered = {at for begin, end in spans for at in range(begin, end)}
    edges = (
        sorted({at for at in covered if at - 1 not in covered}),
        sorted(at + 1 for at in covered if at + 1 not in covered),
    )
    return list(zip(*edges, strict=True))


def check(template: str, talk: list[dict[str, str]]) -> None:
    """Compare with the definition: the same where it proves a mask, more only for a text's end token."""
    chat = ChatFormat(template, SPECIALS, {}, "<|none|>")
    try:
        text, expected = answers_of(template, talk, SPECIALS, {})
    except Exception:  # the template's own
        with pytest.raises(ChatError):
            render_chat(chat, talk)
        return
    if expected is None and not text.endswith(EOS):
        with pytest.raises(ChatError) as refused:
            render_chat(chat, talk)
        assert refused.value.reason == "unproved_mask"
        return
    try:
        rendered = render_chat(chat, talk)
    except ChatError:
        assert expected is None  # a text's end token alone does not prove a mask
        return
    assert rendered.text == text
    if expected is not None:
        assert spans_of(rendered.marks) == joined(expected)


@settings(max_examples=400, deadline=None)
@given(TEMPLATES, TALKS)
def test_masks_are_those_of_the_definition_for_whatever_a_template_reads(
    template: str, talk: list[dict[str, str]]
) -> None:
    check(template, talk)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("inside", IN)
@pytest.mark.parametrize("before", BEFORE)
def test_masks_are_those_of_the_definition_for_every_pair_of_habits(before: str, inside: str) -> None:
    roles = ["system", *["user", "assistant"] * 3, "tool", "assistant"]
    talk = [{"role": role, "content": f"c{number}"} for number, role in enumerate(roles)]
    for talks in (talk, talk[1:]):
        check(f"{before}{{% for m in messages %}}{inside}{{% endfor %}}{PROMPT}", talks)


def long_talk(turns: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": "a"} for number in range(turns)]


class CountedWork(Work):
    """Tells how many steps were taken."""

    @property
    def taken(self) -> int:
        return self.limit - self._left


LINEAR = {
    "plain": PLAIN,
    "last": "{% for m in messages %}" + IN[1] + "{% endfor %}" + PROMPT,
    "system first": BEFORE[1] + PLAIN,
    "state": BEFORE[2] + "{% for m in messages %}" + IN[7] + "{% endfor %}" + PROMPT,
    "scan": BEFORE[5] + PLAIN,
    "neighbors": "{% for m in messages %}" + IN[4] + IN[5] + "{% endfor %}" + PROMPT,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("template", LINEAR.values(), ids=LINEAR)
def test_a_mask_costs_steps_in_proportion_to_the_turns(template: str) -> None:
    taken = []
    for turns in (400, 800, 1600):
        talk = long_talk(turns)
        work = CountedWork(1 << 20)
        prefixes = Prefixes(template, talk, {}, work)
        for number in range(1, turns, 2):
            prefixes.length_of(number, prompt=True)
            prefixes.length_of(number + 1, prompt=False)
        taken.append(work.taken)
    assert all(b < 2.2 * a for a, b in pairwise(taken)), taken


def test_a_template_that_counts_messages_is_bounded_by_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each beginning reads before its loop has another answer in the whole: all are rendered."""
    counting = "{% set last = messages|length %}" + PLAIN
    chat = ChatFormat(counting, SPECIALS, {}, EOS)
    assert render_chat(chat, long_talk(200)).trained_bytes == 100 * len("a<|e|>")
    monkeypatch.setattr("shardkit.tokens.chat_work._MOST_STEPS", 400_000)
    with pytest.raises(ChatError, match="more than 400,000 steps") as refused:
        render_chat(chat, long_talk(2000))
    assert refused.value.reason == "template_limit"


def test_an_end_token_behind_the_last_message_only_is_no_part_of_earlier_answers() -> None:
    """Phi-3's template writes one."""
    chat = ChatFormat(
        PLAIN + "{% if not add_generation_prompt %}" + EOS + "{% endif %}", SPECIALS, {}, "<|n|>"
    )
    rendered = render_chat(chat, long_talk(6))
    assert rendered.text.endswith(EOS)
    starts = [at for at, _ in spans_of(rendered.marks)]
    assert len(starts) == 3
    assert rendered.text[slice(*spans_of(rendered.marks)[0])] == "a<|e|>"


def test_the_last_answer_needs_no_proof_of_those_before() -> None:
    forgetting = PLAIN.replace("m.content", "m.content if loop.last else m.content.split('</think>')[-1]")
    talk = long_talk(6)
    talk[1] = {"role": "assistant", "content": "<think>x</think>b"}
    chat = ChatFormat(forgetting, SPECIALS, {}, EOS)
    with pytest.raises(ChatError, match="differently when other messages follow it"):
        render_chat(chat, talk)
    rendered = render_chat(chat, talk, train_on="last_assistant")
    assert [rendered.text[a:b] for a, b in spans_of(rendered.marks)] == ["a<|e|>"]
