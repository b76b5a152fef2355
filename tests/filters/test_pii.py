"""What counts as personal data, what does not, and that every byte of it is accounted for."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.filters.pii import PiiEditor, find_emails, find_ip_addresses, find_phones
from support.filter_runs import edit, fails, text_batch

ANGLED = PiiEditor(email_replacement=("<EMAIL>",), ip_replacement=("<IP>",), phone_replacement=("<PHONE>",))


def redacted(text: str, config: PiiEditor = ANGLED) -> str:
    found = edit(config, text_batch([text]))
    assert tuple(found.counts) == config.edits
    return str(found.texts[0].as_py())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jo.doe+x@mail.example.co.uk.", "Write to <EMAIL>."),
        ("<John_D@Example.COM>, é@b.de", "<<EMAIL>>, é@b.de"),
        ("(a@b.org;c@d.org) a@b@c.de", "(<EMAIL>;<EMAIL>) a@<EMAIL>"),
        ("@user, a @ b.c, a@b, .@b.de, user@localhost x..y@z.de", None),
        ("8.8.8.8, 8.8.4.4:53 and 1.1.1.1.", "<IP>, <IP>:53 and <IP>."),
        ("10.0.0.1 192.168.1.1 127.0.0.1 169.254.0.1 0.0.0.0 224.0.0.256 8.8.8.08", None),
        ("1.2.3.4.5 v8.8.8.8 8.8.8.8a 8.8.8", None),
        ("[2001:4860:4860::8888]:53 2606:4700::1111", "[<IP>]:53 <IP>"),
        ("2001:db8::1 ::1 fe80::1 a::b std::string 12:30:45 2001:4860::zz 3000:1:2", None),
        ("+1 212 555 0123, +49 (30) 123456-78; +442079460958", "<PHONE>, <PHONE>; <PHONE>"),
        ("(212) 555-0123 212-555-0123 1-212-555-0123 212.555.0123!", "<PHONE> <PHONE> <PHONE> <PHONE>!"),
        ("+12 34, 2 + 2 = 4, 555-0123, 112-555-0123, 12125550123, 212-555-01234, 2012-555-0123", None),
        ("mail a@b.de or call +49 30 1234567 at 9.9.9.9", "mail <EMAIL> or call <PHONE> at <IP>"),
    ],
)
def test_what_is_redacted_and_what_is_not(text: str, expected: str | None) -> None:
    assert redacted(text) == (text if expected is None else expected)


def test_replacements_go_round_and_what_was_redacted_stays() -> None:
    once = redacted("a@b.de c@d.de e@f.de 8.8.8.8 9.9.9.9", PiiEditor())
    assert once == (
        "email@example.com firstname.lastname@example.org email@example.com 22.214.171.124 126.96.36.199"
    )
    assert redacted(once, PiiEditor()) == once


def test_documents_with_too_many_matches_are_dropped() -> None:
    found = edit(PiiEditor(max_matches=5), text_batch(["a@b.de", "a@b.de " * 6, "x"]))
    assert fails(found.rules[0]) == [False, True, False]
    assert found.counts["emails"].tolist() == [1, 6, 0]


def test_kinds_that_are_off_stay() -> None:
    text = "a@b.de 8.8.8.8 +49 30 1234567"
    assert redacted(text, PiiEditor(emails=False, ip_addresses=False, phones=False)) == text


PARTS = st.sampled_from(
    [*"@.:-+() \n1829aZ_é\u2028", "a@b.de", "8.8.", "555-0123", "(212) ", "2001:", "::", "\r\n", "+49 "]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PARTS, st.characters(exclude_categories=["Cs"])), max_size=30).map("".join))
def test_the_quick_look_misses_nothing(text: str) -> None:
    finds = [list(find(text)) for find in (find_emails, find_ip_addresses, find_phones)]
    for spans in finds:
        assert all(0 <= begin < end for begin, end in spans)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    found = edit(ANGLED, text_batch([text]))
    if not any(finds):
        assert found.texts[0].as_py() == text
    for number, name in enumerate(("emails", "ip_addresses", "phones")):
        if not any(finds[:number]):  # the later kinds see what the earlier ones left
            assert found.counts[name][0] == len(finds[number])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", ["a", "@", "a@", "1.", "2", "2000:", "+1 ", "212-", "+1(1)", "a.a@a."])
def test_hostile_megabytes_take_linear_time(part: str) -> None:
    started = time.process_time()
    redacted(part * ((1 << 20) // len(part)))
    assert time.process_time() - started < 20
