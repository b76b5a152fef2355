"""Find payment card numbers, IBANs and access keys, which a checksum or a published form tells from others.

A payment card number has 13 to 19 digits, plain or in groups (4-4-4-4, 4-4-4-4-3, 4-6-5, 4-6-4) separated by
single spaces or by hyphens. It has the length and prefix of an issuer and a Luhn check digit (ISO/IEC 7812-1,
annex B), and its digits are not all equal. It is not part of a longer number or word, and does not follow
"+". Thirteen digits with the check digit of an EAN-13 (an article number or ISBN) are not a card.

An IBAN (ISO 13616) is in upper case, plain or in groups of four separated by single spaces. It has the length
that SWIFT's IBAN registry gives for its country, and ISO 7064's MOD 97-10 of it is 1.

A number in groups separated by spaces is not found in a longer row of groups of four letters and digits, such
as a table of years or a hexadecimal dump: the group before or after it must have another length or no digit.

An access key has one of these forms; those of GitHub (but github_pat_) and npm end with a checksum, the CRC32
of the 30 characters between the prefix and the checksum in base 62 (digits, upper case, lower case):

    AWS     AKIA or ASIA, 16 characters of base 32    AWS IAM User Guide, "IAM identifiers"
    GitHub  ghp_, gho_, ghu_, ghs_ or ghr_, 30 + 6    github.blog, 2021: "Behind GitHub's new
                                                      authentication token formats"
            github_pat_, 22, "_", 59                  form as in the rules of secret scanners
    npm     npm_, 30 + 6                              github.blog, 2021: "Announcing npm's new access
                                                      token format"
    Slack   xoxa-, xoxb-, xoxp-, xoxr- or xoxs-,      Slack API, "Token types"
            1 to 4 numbers, then 10 to 255
    Google  AIza, 35                                  Google Cloud, "API keys"
    Stripe  sk_live_ or rk_live_, 24 to 255           Stripe, "API keys"
    PEM     from BEGIN to END of ... PRIVATE KEY      RFC 7468; PGP's: RFC 9580, section 6.2
            (BLOCK), at most 16,384 characters

Letters and digits are those of ASCII: a number may stand directly behind a Chinese character.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

Spans = Iterator[tuple[int, int]]

# RE2 patterns for preselection: each matches every text in which the function of its kind finds a match.
_FOUR = "[2-6][0-9]{3}[ -]"
CARD_CANDIDATE = (
    f"[2-6][0-9]{{12}}|{_FOUR}(?:[0-9]{{4}}[ -][0-9]{{4}}[ -][0-9]{{4}}|[0-9]{{6}}[ -][0-9]{{4}})"
)
IBAN_CANDIDATE = "[A-Z]{2}[0-9]{2} ?[0-9A-Z]{4} ?[0-9A-Z]{4}"
KEY_CANDIDATE = (
    "A[KS]IA[2-7A-Z]{16}|gh[oprsu]_[0-9A-Za-z]{36}|github_pat_[0-9A-Za-z]{22}_|npm_[0-9A-Za-z]{36}"
    "|xox[abprs]-[0-9]|AIza[0-9A-Za-z_-]{35}|[rs]k_live_[0-9A-Za-z]{24}|PRIVATE KEY(?: BLOCK)?-----"
)

_CARD = re.compile(
    r"(?<![\w+])(?<!\d[.-])"
    r"(?:\d{13,19}+|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3}(?![\w]|[.-]\d))?|\d{4}([ -])\d{6}\2\d{4,5}+)"
    r"(?!\w|[.-]\d)",
    re.ASCII,
)
_ISSUERS = (  # lengths, and the least and the greatest prefix
    ((13, 16, 19), "4", "4"),  # Visa
    ((16,), "51", "55"),  # Mastercard
    ((16,), "2221", "2720"),  # Mastercard
    ((15,), "34", "34"),  # American Express
    ((15,), "37", "37"),  # American Express
    ((16, 17, 18, 19), "6011", "6011"),  # Discover
    ((16, 17, 18, 19), "644", "659"),  # Discover
    ((14,), "300", "305"),  # Diners Club
    ((14,), "36", "36"),  # Diners Club
    ((14,), "38", "39"),  # Diners Club
    ((16, 17, 18, 19), "3528", "3589"),  # JCB
    ((16, 17, 18, 19), "62", "62"),  # UnionPay
    *(
        (tuple(range(13, 20)), one, one) for one in ("5018", "5020", "5038", "5893", "6304", "6759")
    ),  # Maestro
    (tuple(range(13, 20)), "6761", "6763"),  # Maestro
)
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)  # the sum of the digits of twice a digit

_IBAN_HEAD = re.compile(r"(?<!\w)[A-Z]{2}\d\d(?= ?[\dA-Z]{4})", re.ASCII)
_IBAN_TAIL = re.compile(r"[\dA-Z]+|(?: [\dA-Z]{4})+(?: [\dA-Z]{1,3})?", re.ASCII)
_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
IBAN_LENGTHS = {country: length for length, names in _COUNTRIES.items() for country in names.split()}

_GROUP_BEFORE = re.compile(r"(?<!\w)(?=[A-Z]{0,3}\d)[\dA-Z]{4} \Z", re.ASCII)
_GROUP_AFTER = re.compile(r" (?=[A-Z]{0,3}\d)[\dA-Z]{4}(?!\w)", re.ASCII)

_KEY = re.compile(
    r"(?<![0-9A-Za-z])(?:"
    r"A[KS]IA[2-7A-Z]{16}"
    r"|(?P<summed>(?:gh[oprsu]|npm)_[0-9A-Za-z]{36})"
    r"|github_pat_[0-9A-Za-z]{22}_[0-9A-Za-z]{59}"
    r"|xox[abprs]-(?:\d{1,13}-){1,4}[0-9A-Za-z]{10,255}+"
    r"|AIza[\w-]{35}(?!-)"
    r"|[rs]k_live_[0-9A-Za-z]{24,255}+"
    r")(?!\w)",
    re.ASCII,
)
_PEM = re.compile(r"-----(BEGIN|END) ((?:[0-9A-Z]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?)-----")
_PEM_CHARACTERS = 16_384
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def find_cards(text: str) -> Spans:
    """Yield (begin, end) of every payment card number."""
    match = _CARD.search(text)
    while match:
        begin, end = match.span()
        if match[1] == " " and end - begin == 23 and not _is_card(match[0]):
            end -= 4  # the last three digits may be another number, such as a security code
        found = _is_card(text[begin:end]) and not _is_in_row(text, begin, end)
        if found:
            yield begin, end
        match = _CARD.search(text, end if found else begin + 1)


def _is_card(text: str) -> bool:
    digits = text.replace(" ", "").replace("-", "")
    return (
        any(len(digits) in lengths and low <= digits[: len(low)] <= high for lengths, low, high in _ISSUERS)
        and has_luhn_digit(digits)
        and len(set(digits)) > 1
        and not (len(digits) == 13 and _has_ean_digit(digits))
    )


def has_luhn_digit(digits: str) -> bool:
    """Return whether the last digit is the Luhn check digit of the digits before it."""
    values = [int(digit) for digit in reversed(digits)]
    return (sum(values[::2]) + sum(_DOUBLED[value] for value in values[1::2])) % 10 == 0


def _has_ean_digit(digits: str) -> bool:
    values = [int(digit) for digit in reversed(digits)]
    return (sum(values[::2]) + 3 * sum(values[1::2])) % 10 == 0


def find_ibans(text: str) -> Spans:
    """Yield (begin, end) of every IBAN."""
    done = 0
    for head in _IBAN_HEAD.finditer(text):
        begin, length = head.start(), IBAN_LENGTHS.get(head[0][:2])
        if length is None or begin < done:
            continue
        end = begin + (length if text[head.end()] != " " else length + (length - 1) // 4)
        tail = _IBAN_TAIL.fullmatch(text, head.end(), end)
        whole = tail is not None and tail.end() == end and not _is_word(text[end : end + 1])
        if whole and _has_iban_digits(text[begin:end]) and not _is_in_row(text, begin, end):
            done = end
            yield begin, end


def _has_iban_digits(text: str) -> bool:
    iban = text.replace(" ", "")
    number = int("".join(str(int(character, 36)) for character in iban[4:] + iban[:4]))
    return "02" <= iban[2:4] <= "98" and number % 97 == 1


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _is_in_row(text: str, begin: int, end: int) -> bool:
    """Return whether a number in groups separated by spaces is in a longer row of groups of four."""
    if text[begin + 4] != " ":
        return False
    before = _GROUP_BEFORE.search(text, max(begin - 6, 0), begin)
    after = _GROUP_AFTER.match(text, end) if text[end - 5] == " " else None
    return bool(before or after)


def find_access_keys(text: str) -> Spans:
    """Yield (begin, end) of every access key and private key."""
    keys = [
        match.span() for match in _KEY.finditer(text) if not match["summed"] or has_key_checksum(match[0])
    ]
    done = 0
    for begin, end in sorted([*keys, *_find_private_keys(text)]):
        if begin >= done:  # otherwise the key is inside a private key
            done = end
            yield begin, end


def has_key_checksum(key: str) -> bool:
    """Return whether the last six characters are the checksum of the characters behind the prefix."""
    value = 0
    for character in key[-6:]:
        value = 62 * value + _BASE62.index(character)
    return value == zlib.crc32(key.partition("_")[2][:-6].encode())


def _find_private_keys(text: str) -> Spans:
    """Yield the spans from a BEGIN line to the END line with the same label, without a BEGIN line between."""
    begin, label = -1, ""
    for marker in _PEM.finditer(text):
        if marker[1] == "BEGIN":
            begin, label = marker.start(), marker[2]
        elif begin >= 0 and marker[2] == label:
            if marker.end() - begin <= _PEM_CHARACTERS:
                yield begin, marker.end()
            begin = -1
