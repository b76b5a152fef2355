"""The mask of a conversation as its definition says: each beginning rendered by itself, in quadratic time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


def answers_of(
    template: str, messages: Sequence[Any], specials: Sequence[str], variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]] | None]:
    """(text, spans of the answers up to the token that ends each); None for the spans if they are unproved.

    `messages` must not spell special tokens. Raises what the template raises.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template)

    def run(count: int, prompt: bool) -> str:
        return compiled.render(
            messages=[*messages[:count]],
            tools=None,
            documents=None,
            add_generation_prompt=prompt,
            **variables,
        )

    pattern = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
    text, spans = run(len(messages), False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = run(number, True) if number else "", run(number + 1, False)
        if not (text.startswith(after) and after.startswith(before)):
            return text, None
        ends = [found.end() for found in pattern.finditer(after, len(before))]
        end = ends[-1] if ends and not after[ends[-1] :].strip() else len(after)
        if end > len(before):
            spans.append((len(before), end))
    return text, spans
