"""Redact e-mail addresses, public IP addresses, phone numbers and, on request, secrets, and count them.

An e-mail address is a local part of at most 64 characters, "@" and a host with a dot and a top-level domain
of letters, in upper or lower case (datatrove's pattern finds lower case only). An IP address is public if
Python's `ipaddress` calls it global; IPv6 addresses must also be in 2000::/3, so that C++'s "a::b" does not
match. A phone number is "+" and 8 to 15 digits that begin with a country code, or a North American number
such as (212) 555-0123, 212-555-0123 or 212.555.0123, optionally after "1-"; it is not part of a longer number
or word. Payment cards, IBANs and access keys are found by writers/filters/secrets.py. Text that is already
equal to a replacement is not redacted again.

Arrow's regular expressions select the few documents that can contain a match; only these are searched with
Python's regular expressions. All patterns are bounded, so no text takes more than linear time.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from shardkit.settings import FieldName, Listed
from shardkit.writers.filters import secrets
from shardkit.writers.filters.base import Edit, FilterSettings, above
from shardkit.writers.filters.secrets import Spans

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch


_LOCAL = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{0,63}\Z")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w]|\.\d)", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])")
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_INTERNATIONAL = r"\+[1-9]\d{0,2}(?:[ .-]?\(?\d{1,4}\)?){2,5}"
_AMERICAN = r"(?:1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[.-]\d{4}"
_PHONE = re.compile(rf"(?<![\w+.-])(?:{_INTERNATIONAL}|{_AMERICAN})(?![\w-]|\.\d)", re.ASCII)


class PiiEditor(FilterSettings):
    """Redacts matches of each kind; the k-th match in a document gets the k-th replacement, cyclically."""

    reasons: ClassVar = ("too_many_matches",)
    omitted_at_default: ClassVar = frozenset(
        {"cards", "ibans", "access_keys", "card_replacement", "iban_replacement", "key_replacement"}
    )

    emails: bool = Field(default=True, description="Redact e-mail addresses.")
    ip_addresses: bool = Field(default=True, description="Redact public IPv4 and IPv6 addresses.")
    phones: bool = Field(default=True, description="Redact phone numbers, international or North American.")
    cards: bool = Field(default=False, description="Redact payment card numbers with a valid check digit.")
    ibans: bool = Field(default=False, description="Redact IBANs with valid check digits.")
    access_keys: bool = Field(
        default=False,
        description="Redact keys of AWS, GitHub, Google, npm, Slack, Stripe, and private keys (PEM).",
    )
    email_replacement: Listed[FieldName] = Field(
        default=("email@example.com", "firstname.lastname@example.org"),
        min_length=1,
        description="Replacements of e-mail addresses; the defaults are datatrove's.",
    )
    ip_replacement: Listed[FieldName] = Field(
        default=(
            "22.214.171.124",
            "126.96.36.199",
            "188.8.131.52",
            "184.108.40.206",
            "220.127.116.11",
            "18.104.22.168",
        ),
        min_length=1,
        description="Replacements of IP addresses; the defaults are datatrove's.",
    )
    phone_replacement: Listed[FieldName] = Field(
        default=("<PHONE>",), min_length=1, description="Replacements of phone numbers."
    )
    card_replacement: Listed[FieldName] = Field(
        default=("<CARD>",), min_length=1, description="Replacements of payment card numbers."
    )
    iban_replacement: Listed[FieldName] = Field(
        default=("<IBAN>",), min_length=1, description="Replacements of IBANs."
    )
    key_replacement: Listed[FieldName] = Field(
        default=("<KEY>",), min_length=1, description="Replacements of access keys."
    )
    max_matches: int | None = Field(
        default=None, ge=0, description="Drop documents with more matches than this; null: no rule. dolma: 5."
    )

    @property
    def edits(self) -> tuple[str, ...]:
        """See Editor.edits. Kinds added after version 1 are named only if they are on, as in older cards."""
        added = {"cards": self.cards, "ibans": self.ibans, "access_keys": self.access_keys}
        return ("emails", "ip_addresses", "phones", *(name for name, is_on in added.items() if is_on))

    def edit(self, batch: TextBatch) -> Edit:
        """See Editor.edit."""
        zeros = {name: np.zeros(len(batch), np.int64) for name in self.edits}
        cut, counts = zeros, {name: zero.copy() for name, zero in zeros.items()}
        texts = batch.texts
        for kind in self._kinds():
            texts = _redact(kind, texts, batch.wanted, cut[kind.name], counts[kind.name])
        matches = np.sum(list(counts.values()), axis=0)
        return Edit(texts, [above("too_many_matches", matches, self.max_matches)], cut, counts)

    def _kinds(self) -> Iterator[_Kind]:
        if self.emails:
            yield _Kind("emails", "[A-Za-z0-9!-~]@[A-Za-z0-9]", find_emails, self.email_replacement)
        if self.ip_addresses:
            address = r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]"
            yield _Kind("ip_addresses", address, find_ip_addresses, self.ip_replacement)
        if self.phones:
            phone = r"\+[1-9][0-9 .(-]|[2-9][0-9][0-9]\)? ?[ .-]?[2-9][0-9][0-9][.-][0-9]{4}"
            yield _Kind("phones", phone, find_phones, self.phone_replacement)
        if self.cards:
            yield _Kind("cards", secrets.CARD_CANDIDATE, secrets.find_cards, self.card_replacement)
        if self.ibans:
            yield _Kind("ibans", secrets.IBAN_CANDIDATE, secrets.find_ibans, self.iban_replacement)
        if self.access_keys:
            yield _Kind("access_keys", secrets.KEY_CANDIDATE, secrets.find_access_keys, self.key_replacement)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    candidate: str  # RE2 pattern for preselection; it matches every text in which `find` finds a match
    find: Callable[[str], Spans]
    replacements: tuple[str, ...]


def _redact(
    kind: _Kind,
    texts: pa.LargeStringArray,
    wanted: npt.NDArray[np.bool_],
    cut: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> pa.LargeStringArray:
    """Replace the matches of a kind; per document, set `cut` (bytes removed) and `counts` (matches)."""
    import pyarrow.compute as pc

    from shardkit.kernels.text_arrays import replace_texts

    hits = pc.match_substring_regex(texts, kind.candidate).to_numpy(zero_copy_only=False)
    changed = {}
    for document in np.flatnonzero(hits & wanted).tolist():
        before = texts[document].as_py()
        after, counts[document] = _replace(kind, before)
        if counts[document]:
            cut[document] = len(before.encode()) - len(after.encode())
            changed[document] = after
    return replace_texts(texts, changed)


def _replace(kind: _Kind, text: str) -> tuple[str, int]:
    """Return the text with every match replaced, and the number of matches."""
    pieces, last, count = [], 0, 0
    for begin, end in kind.find(text):
        if text[begin:end] not in kind.replacements:
            pieces += [text[last:begin], kind.replacements[count % len(kind.replacements)]]
            last, count = end, count + 1
    return "".join([*pieces, text[last:]]), count


def find_emails(text: str) -> Spans:
    """Yield (begin, end) of every e-mail address."""
    at, done = text.find("@"), 0
    while at >= 0:
        local = _LOCAL.search(text, max(done, at - 64), at)
        host = _HOST.match(text, at + 1) if local else None
        if local and host and ".." not in local[0] and text[at - 1] != ".":
            done = host.end()
            yield local.start(), done
        at = text.find("@", at + 1)


def find_ip_addresses(text: str) -> Spans:
    """Yield (begin, end) of every public IPv4 or IPv6 address."""
    spans = [(m.start(), m.end()) for m in _IPV4.finditer(text) if _is_public(m[0])]
    spans += [(m.start(), m.end()) for m in _IPV6.finditer(text) if _is_public(m[0])]
    yield from sorted(spans)


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and (parsed.version == 4 or parsed in _GLOBAL_IPV6)


def find_phones(text: str) -> Spans:
    """Yield (begin, end) of every phone number."""
    for match in _PHONE.finditer(text):
        if not match[0].startswith("+") or 8 <= sum(map(str.isdigit, match[0])) <= 15:
            yield match.start(), match.end()
