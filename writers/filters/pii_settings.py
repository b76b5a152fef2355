"""The settings of redacting personal data."""

from __future__ import annotations

from pydantic import Field

from shardkit.writers.filters.settings import FieldName, FilterSettings

__all__ = ["PiiConfig"]


class PiiConfig(FilterSettings):
    """What is redacted, and by what: the k-th find of a document gets the k-th replacement, in a circle."""

    emails: bool = Field(default=True, description="Redact e-mail addresses.")
    ip_addresses: bool = Field(default=True, description="Redact public IPv4 and IPv6 addresses.")
    phones: bool = Field(default=True, description="Redact phone numbers, international or North American.")
    email_replacement: tuple[FieldName, ...] = Field(
        default=("email@example.com", "firstname.lastname@example.org"),
        strict=False,
        min_length=1,
        description="Text in the place of e-mail addresses; datatrove's.",
    )
    ip_replacement: tuple[FieldName, ...] = Field(
        default=(
            "22.214.171.124",
            "126.96.36.199",
            "188.8.131.52",
            "184.108.40.206",
            "220.127.116.11",
            "18.104.22.168",
        ),
        strict=False,
        min_length=1,
        description="Text in the place of IP addresses; datatrove's.",
    )
    phone_replacement: tuple[FieldName, ...] = Field(
        default=("<PHONE>",), strict=False, min_length=1, description="Text in the place of phone numbers."
    )
    max_matches: int | None = Field(
        default=None, ge=0, description="Drop documents with more finds; dolma: 5; null: none."
    )
