"""What counts as personal data, what does not, and that every byte of it is accounted for."""

from __future__ import annotations

import random
import string
import time
import zlib
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.filters import secrets
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.pii import PiiEditor, find_emails, find_ip_addresses, find_phones
from shardkit.writers.filters.secrets import find_access_keys, find_cards, find_ibans
from support.filter_runs import documents, edit, fails, text_batch

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


SECRETS = PiiEditor(emails=False, ip_addresses=False, phones=False, cards=True, ibans=True, access_keys=True)
ALPHANUMERICS = string.digits + string.ascii_uppercase + string.ascii_lowercase
FINDERS = (
    (find_cards, secrets.CARD_CANDIDATE),
    (find_ibans, secrets.IBAN_CANDIDATE),
    (find_access_keys, secrets.KEY_CANDIDATE),
)


def summed(prefix: str, middle: str) -> str:
    """A key with the checksum of GitHub and npm, by repeated division."""
    rest, digits = zlib.crc32(middle.encode()), ""
    for _ in range(6):
        rest, digit = divmod(rest, 62)
        digits = ALPHANUMERICS[digit] + digits
    return prefix + middle + digits


def pem(label: str, body: str, end: str | None = None) -> str:
    dashes = "-" * 5
    return f"{dashes}BEGIN {label}{dashes}\n{body}\n{dashes}END {end or label}{dashes}"


# Parts are joined here, so that scanners for secrets do not take this file for one.
KEYS = {
    "aws": "AK" + "IA" + "QWERTYUIOP234567",
    "aws, temporary": "AS" + "IA" + "QWERTYUIOP234567",
    **{kind: summed("gh" + kind + "_", "a1B2c3D4e5" * 3) for kind in "pousr"},
    "github, fine-grained": "github" + "_pat_" + "1A" * 11 + "_" + "b" * 59,
    "npm": summed("np" + "m_", "Zz9Yy8Xx7W" * 3),
    "slack, bot": "xo" + "xb-123456789012-1234567890123-" + "aB3" * 8,
    "slack, user": "xo" + "xp-12345678901-1234567890-12345678901-" + "0f" * 16,
    "google": "AI" + "za" + "Sy-_" + "c3" * 15 + "D",
    "stripe": "sk" + "_live_" + "9x" * 12,
    "stripe, restricted": "rk" + "_live_" + "9x" * 50,
    "pem": pem("PRIVATE " + "KEY", "MIIB\nVQ=="),
    "pem, rsa": pem("RSA PRIVATE " + "KEY", "Proc-Type: 4,ENCRYPTED\r\n\r\nMIIB" + "A/+" * 500),
    "pgp": pem("PGP PRIVATE " + "KEY BLOCK", "\nlQVY\n=abcd"),
}

CARDS = (  # test numbers that the schemes and payment processors publish
    *("4111111111111111", "4111 1111 1111 1111", "4111-1111-1111-1111", "4222222222222", "4012888888881881"),
    *("5555555555554444", "5105 1051 0510 5100", "2223003122003222", "2720-9921-0000-0002"),
    *("378282246310005", "3782 822463 10005", "3714-496353-98431"),
    *("6011111111111117", "6011 0009 9013 9424", "6445644564456445"),
    *("30569309025904", "3056 930902 5904", "38520000023237", "36227206271667"),
    *("3530111333300000", "3566 0020 2036 0505", "6200000000000005", "6759649826438453", "6304000000000000"),
    *("6205500000000000004", "6205 5000 0000 0000 004"),
)
NO_CARDS = (
    *("4111111111111112", "4111 1111 1111 1112", "5555-5555-5555-4445"),  # wrong check digits
    *("1234567812345670", "2721000000000004", "9111111111111116"),  # no issuer has the prefix
    *("41111111111111111111", "14111111111111111", "4111 1111 1111 1111 1111", "2024 4111 1111 1111 1111"),
    *("a4111111111111111", "4111111111111111a", "_4111111111111111", "4111111111111111_"),
    *("4111111111111111.5", "3.4111111111111111", "4111-1111-1111-1111-1", "1-4111-1111-1111-1111"),
    *("4111 1111-1111 1111", "4111  1111 1111 1111", "41111111 11111111", "4111 1111 1111111 1"),
    *("4111\n1111\n1111\n1111", "411111 1111 111111", "0000000000000000", "3782 8224 6310 005"),
    *("978-3-16-148410-0", "9783161484100", "4006381333931", "+491511234567890", "+4222222222222"),
    *("4111-1111-1111-1111-111111111111", "123e4567-e89b-12d3-a456-426614174000", "4.111.1111.1111.111"),
    *(
        "1700000000000",
        "20240115123045678",
        "2024-01-15T12:30:45.123456789",
        "5d41402abc4b2a76b9719d911017c592",
    ),
    *("2019 2020 2021 2022 2023 2024 2025", "6.5.4.3.2.1", "٤١١١١١١١١١١١١١١١"),
)

# One for each country of the registry: its examples, and others of the same form.
EXAMPLES = """
AD1200012030200359100100 AE070331234567890123456 AL47212110090000000235698741 AT611904300234573201
AZ21NABZ00000000137010001944 BA391290079401028494 BE68539007547034 BG80BNBG96611020345678
BH67BMAG00001299123456 BI4210000100010000332045181 BR9700360305000010009795493P1
BY13NBRB3600900000002Z00AB00 CH9300762011623852957 CR05015202001026284066 CY17002001280000001200527600
CZ6508000000192000145399 DE89370400440532013000 DJ2100010000000154000100186 DK5000400440116243
DO28BAGR00000001212453611324 EE382200221020145685 EG380019000500000000263180002
ES9121000418450200051332 FI2112345600000785 FK88SC123456789012 FO6264600001631634
FR1420041010050500013M02606 GB29NWBK60161331926819 GE29NB0000000101904917 GI75NWBK000000007099453
GL8964710001000206 GR1601101250000000012300695 GT82TRAJ01020000001210029690
HN88CABF00000000000250005469 HR1210010051863000160 HU42117730161111101800000000
IE29AIBK93115212345678 IL620108000000099999999 IQ98NBIQ850123456789012 IS140159260076545510730339
IT60X0542811101000000123456 JO94CBJO0010000000000131000302 KW81CBKU0000000000001234560101
KZ86125KZT5004100100 LB62099900000001001901229114 LC55HEMM000100010012001200023015
LI21088100002324013AA LT121000011101001000 LU280019400644750000 LV80BANK0000435195001
LY83002048000020100120361 MC5811222000010123456789030 MD24AG000225100013104168
ME25505000012345678951 MK07250120000058984 MN121234123456789123 MR1300020001010000123456753
MT84MALT011000012345MTLCAST001S MU17BOMM0101101030300200000MUR NI45BAPR00000013000003558124
NL91ABNA0417164300 NO9386011117947 OM810180000001299123456 PK36SCBL0000001123456702
PL61109010140000071219812874 PS92PALS000000000400123456702 PT50000201231234567890154
QA58DOHB00001234567890ABCDEFG RO49AAAA1B31007593840000 RS35260005601001611379
RU0304452522540817810538091310419 SA0380000000608010167519 SC18SSCB11010000000000001497USD
SD2129010501234001 SE4550000000058398257466 SI56263300012039086 SK3112000000198742637541
SM86U0322509800000000270100 SO211000001001000100141 ST68000100010051845310112
SV62CENR00000000000000700025 TL380080012345678910157 TN5910006035183598478831
TR330006100519786457841326 UA213223130000026007233566001 VA59001123000012345678
VG96VPVG0000012345678901 XK051212012345678906 YE15CBYE0001018861234567891234
"""
IBANS = EXAMPLES.split()
NO_IBANS = (
    *("DE89370400440532013001", "DE88370400440532013000", "DE89 3704 0044 0532 0130 01"),  # wrong digits
    *(
        "de89370400440532013000",
        "DE8937040044053201300",
        "DE893704004405320130000",
        "XDE89370400440532013000",
    ),
    *(
        "DE89370400440532013000X",
        "DE89370400440532013000_",
        "_DE89370400440532013000",
        "US89370400440532013000",
    ),
    *("DE89 37040044 0532 0130 00", "DE89  3704 0044 0532 0130 00", "DE89-3704-0044-0532-0130-00"),
    *("DE 89 3704 0044 0532 0130 00", "DE89 3704 0044 0532 0130 000", "DE89\n3704 0044 0532 0130 00"),
    *("0AF3 BE68 5390 0754 7034", "BE68 5390 0754 7034 0A1B", "DE89 3704 0044 0532 0130 0"),
)
NO_KEYS = (
    *(
        "AK" + "IA" + "QWERTYUIOP23456",
        KEYS["aws"] + "A",
        "x" + KEYS["aws"],
        "AK" + "IA" + "QWERTYUIOP234561",
    ),
    *(KEYS["p"][:-1] + "_", KEYS["p"] + "0", KEYS["p"][:-1], "x" + KEYS["p"], "ghx_" + KEYS["p"][4:]),
    *(KEYS["npm"][:-1], KEYS["npm"].replace("Zz9", "Zz8", 1), KEYS["p"].replace("a1B", "a2B", 1)),
    *(KEYS["github, fine-grained"] + "b", "github" + "_pat_" + "1A" * 11 + "b" * 60),
    *("xo" + "xb-your-slack-bot-token", "xo" + "xc-1-" + "a" * 24, "xo" + "xb-1-" + "a" * 9),
    *(KEYS["google"] + "-", KEYS["google"][:-1], "sk" + "_test_" + "9x" * 12, "sk" + "_live_" + "9x" * 11),
    *(pem("PUBLIC KEY", "MIIB"), pem("PRIVATE " + "KEY", "MIIB", "RSA PRIVATE " + "KEY")),
    *(
        pem("PRIVATE " + "KEY", "A" * 16_384),
        pem("PRIVATE " + "KEY", "")[:-1],
        pem("PRIVATE " + "KEY", "")[1:],
    ),
)
AROUND = (
    "{}",
    "{}.",
    "{}\n",
    "\n{}\r\nand",
    "No. {}, valid",
    "({})",
    '"{}"',
    "={};",
    "<b>{}</b>",
    "卡{}。",
    "{}: x",
)


def groups_of_four(number: str) -> str:
    return " ".join(number[at : at + 4] for at in range(0, len(number), 4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("around", AROUND)
def test_secrets_are_redacted_in_running_text(around: str) -> None:
    ibans = [*IBANS, *map(groups_of_four, IBANS)]
    kinds = (("<CARD>", CARDS), ("<IBAN>", ibans), ("<KEY>", KEYS.values()))
    for replacement, found in kinds:
        for one in found:
            assert redacted(around.format(one), SECRETS) == around.format(replacement), one


@pytest.mark.parametrize("text", [*NO_CARDS, *NO_IBANS, *NO_KEYS])
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    for around in AROUND:
        assert redacted(around.format(text), SECRETS) == around.format(text)


def test_every_country_of_the_registry_has_an_example_of_its_length() -> None:
    assert {iban[:2]: len(iban) for iban in IBANS} == secrets.IBAN_LENGTHS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4111 1111 1111 1111 12/29 123, 4111 1111 1111 1111 123", "<CARD> 12/29 123, <CARD> 123"),
        ("4111111111111111 4111111111111111\t5555555555554444", "<CARD> <CARD>\t<CARD>"),
        ("IBAN BE68 5390 0754 7034 BIC ABCDBEBB", "IBAN <IBAN> BIC ABCDBEBB"),
        ("DE89 3704 0044 0532 0130 00 2024", "<IBAN> 2024"),
        ("GB29NWBK60161331926819/NL91ABNA0417164300", "<IBAN>/<IBAN>"),
        (f"a={KEYS['aws']}&b={KEYS['p']}", "a=<KEY>&b=<KEY>"),
        (f"{pem('PRIVATE ' + 'KEY', KEYS['aws'])}{KEYS['npm']}", "<KEY><KEY>"),
        (f"{KEYS['pem'][:20]}\n{KEYS['pem']}\n{KEYS['pem'][-20:]}", None),
        (f"{KEYS['pem'][:30]}\n{KEYS['pem']}", f"{KEYS['pem'][:30]}\n<KEY>"),
    ],
)
def test_secrets_next_to_others(text: str, expected: str | None) -> None:
    if expected is None:
        expected = text.replace(KEYS["pem"], "<KEY>")
    assert redacted(text, SECRETS) == expected
    assert redacted(expected, SECRETS) == expected


def test_secrets_stay_by_default_and_have_replacements_of_their_own() -> None:
    text = f"{CARDS[0]} {IBANS[0]} {KEYS['npm']} {CARDS[1]}"
    assert redacted(text, PiiEditor()) == text
    own = PiiEditor(
        cards=True,
        ibans=True,
        access_keys=True,
        card_replacement=("A", "B"),
        iban_replacement=("C",),
        key_replacement=("D",),
    )
    assert own.edits == ("emails", "ip_addresses", "phones", "cards", "ibans", "access_keys")
    assert redacted(text, own) == "A C D B"
    assert fails(edit(own.model_copy(update={"max_matches": 3}), text_batch([text])).rules[0]) == [True]


def test_recipes_and_cards_without_the_added_kinds_are_as_before() -> None:
    kinds, replacements = ("emails", "ip_addresses", "phones"), ("email", "ip", "phone")
    former = [*kinds, *(f"{kind}_replacement" for kind in replacements), "max_matches"]
    assert list(PiiEditor().entry("pii")["pii"]) == former
    assert PiiEditor(cards=True).entry("pii")["pii"]["cards"] is True
    chain = FilterChain([("pii", PiiEditor())])
    assert chain.edits == ("pii/emails", "pii/ip_addresses", "pii/phones")
    result = chain.apply(documents([CARDS[0]]))
    assert set(result.cut) == set(result.counts) == set(chain.edits)
    assert FilterChain([("pii", PiiEditor(ibans=True))]).edits == (*chain.edits, "pii/ibans")


def has_luhn_digit(digits: str) -> bool:
    """The rule as ISO/IEC 7812-1 tells it."""
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        doubled = 2 * digit if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"4[0-9]{14}|5[1-5][0-9]{13}|62[0-9]{16}", fullmatch=True), st.data())
def test_a_number_is_a_card_if_its_luhn_digit_holds(digits: str, data: st.DataObject) -> None:
    [check] = [digit for digit in "0123456789" if has_luhn_digit(digits + digit)]
    number = digits + check
    assert list(find_cards(f"a {number}, b")) == ([(2, 2 + len(number))] if len(set(number)) > 1 else [])
    place = data.draw(st.integers(0, len(number) - 1))
    changed = data.draw(st.sampled_from([digit for digit in "0123456789" if digit != number[place]]))
    other = number[:place] + changed + number[place + 1 :]
    assert not secrets.has_luhn_digit(other)
    assert not list(find_cards(f"a {other}, b"))
    if len(number) == 16:
        assert not list(find_cards(f"a {groups_of_four(other)}, b"))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(IBANS), st.data())
def test_an_iban_with_a_changed_character_is_none(iban: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(2, len(iban) - 1))
    digits = string.digits if place < 4 else string.digits + string.ascii_uppercase
    changed = data.draw(st.sampled_from(digits))
    other = iban[:place] + changed + iban[place + 1 :]
    number = int("".join(str(int(character, 36)) for character in other[4:] + other[:4]))
    assert bool(list(find_ibans(other))) == (number % 97 == 1 and "02" <= other[2:4] <= "98")


PIECES = st.sampled_from(
    [
        *(
            *" -.\n+_a4Z0é卡",
            "4111",
            "1111",
            "1111 1111",
            "123",
            *CARDS[:8],
            *IBANS[:3],
            groups_of_four(IBANS[6]),
        ),
        *(*KEYS.values(), KEYS["pem"][:27], KEYS["pem"][-25:], KEYS["aws"][:9], "xo" + "xb-", "DE89 "),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join))
def test_the_quick_look_misses_no_secret(text: str) -> None:
    for find, candidate in FINDERS:
        spans = list(find(text))
        assert all(0 <= begin < end <= len(text) for begin, end in spans)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        if spans:
            assert pc.match_substring_regex(pa.array([text]), candidate).to_pylist() == [True]
    redacted(text, SECRETS)  # every byte is accounted for


def test_every_example_is_found_whole_by_one_kind() -> None:
    for one in (*CARDS, *IBANS, *map(groups_of_four, IBANS), *KEYS.values()):
        found = [list(find(one)) for find, _ in FINDERS]
        assert sorted(found) == [[], [], [(0, len(one))]], one


def test_random_numbers_are_cards_as_often_as_the_rules_say() -> None:
    chosen = random.Random(17)
    numbers = [f"4{chosen.randrange(10**15):015}" for _ in range(5000)]
    found = [bool(list(find_cards(number))) for number in numbers]
    assert found == [has_luhn_digit(number) for number in numbers]
    assert 400 < sum(found) < 600


BEGIN = KEYS["pem"].partition("\n")[0]
HOSTILE = (
    *(
        "4",
        "4 ",
        "4-",
        "4111 ",
        "4111-",
        "41111111 ",
        "4111 111111 ",
        "5105 1051 0510 5100 ",
        " ",
        "1.",
        CARDS[0],
    ),
    *("DE89", "DE89 ", "DE89 3704 ", "A1", "BE68 5390 0754 7034 ", "DE89370400440532013001 "),
    *(
        "AK" + "IA",
        "gh" + "p_",
        KEYS["p"][:-1] + "0 ",
        "xo" + "xb-",
        "xo" + "xb-1-",
        "1-",
        "xo" + "xb-1-1-1-1-aaaaaaaaaaa_",
    ),
    *("AI" + "za", "AI" + "za-", "sk" + "_live_", "np" + "m_", "github" + "_pat_", "-", "-----BEGIN ", "A "),
    *(
        BEGIN,
        BEGIN + "\n",
        f"{BEGIN}a\n" * 3 + KEYS["pem"][-25:],
        "PRIVATE " + "KEY-----",
        "-----BEGIN A A A A A ",
    ),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", HOSTILE)
def test_hostile_megabytes_take_each_kind_of_secret_linear_time(part: str) -> None:
    text = part * ((1 << 20) // len(part))
    for find, candidate in FINDERS:
        started = time.process_time()
        list(find(text))
        pc.match_substring_regex(pa.array([text]), candidate)
        assert time.process_time() - started < 5, find.__name__
