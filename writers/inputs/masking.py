"""Documents with a loss mask: conversations and prompts of records, rendered by `shardkit.tokens.chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.formats.tokenizer_file import find_tokenizer
from shardkit.tokens.chat import ChatError, ChatFormat, Rendered, pair_of, render_chat
from shardkit.writers.inputs.fields import MISSING, field_at
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.recipe import Recipe


@dataclass(frozen=True)
class Masking:
    """Renders records as documents with marks, in a build with a loss mask; plain data to pass to tasks."""

    chat: ChatFormat | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Masking | None:
        """Return a recipe's Masking, None if it has no loss mask; raise RecipeError as `ChatFormat.of`."""
        return cls(_chat_format(recipe)) if recipe.is_masked else None

    def of_input(self, config: InputConfig) -> Masking:
        """Return the Masking for one input: without the chat template if the input has no conversations."""
        return self if config.messages is not None else Masking()

    def render(self, config: InputConfig, fields: Mapping[str, Any]) -> Rendered:
        """Render the document of a record; raise ChatError if the record cannot be rendered."""
        if config.messages is not None:
            assert self.chat is not None
            messages, tools = field_at(fields, config.messages), field_at(fields, config.tools)
            if messages is MISSING:
                raise ChatError("no_text", f"no field {config.messages!r}; its fields: {', '.join(fields)}")
            given = None if tools is MISSING or not tools else tools
            variables = field_at(fields, config.chat_template_kwargs)
            variables = None if variables is MISSING else variables
            return render_chat(self.chat, messages, given, variables, train_on=config.train_on)
        assert config.prompt is not None
        assert config.completion is not None
        texts = [field_at(fields, path) for path in (config.prompt, config.completion)]
        for path, text in zip((config.prompt, config.completion), texts, strict=True):
            if not isinstance(text, str):
                raise ChatError("no_text", f"field {path!r} is not text; its fields: {', '.join(fields)}")
        return pair_of(str(texts[0]), str(texts[1]))


def _chat_format(recipe: Recipe) -> ChatFormat | None:
    """Return a recipe's chat format; None without conversations."""
    if not any(config.messages for config in recipe.inputs):
        return None
    given = recipe.tokenizer
    assert given is not None
    path = find_tokenizer(recipe.folder, given.path)
    template = None if given.chat_template is None else recipe.resolve(given.chat_template)
    variables = given.chat_template_kwargs
    return ChatFormat.of(path, given.eos, bos=given.bos, template=template, variables=variables)
