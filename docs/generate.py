"""Write the recipe and command-line references, from the models and parsers that the package itself uses.

    python docs/generate.py            # rewrite docs/reference/recipe.md and docs/reference/cli.md

A test compares both pages with what this writes, so that they cannot differ from the code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardkit.cli.declared import Keys
from shardkit.cli.main import Parser, make_parser, shared_parser
from shardkit.writers.filters.config import PROFILES
from shardkit.writers.recipe.recipe import Recipe

FOLDER = Path(__file__).resolve().parent / "reference"
PAGES = ("recipe.md", "cli.md")

Json = dict[str, Any]
BAR = "\\|"  # inside of a table's code

RECIPE_HEAD = """\
# Recipe reference

Every key of a recipe, generated from the models that check recipes. Unknown keys are errors, and every problem is
reported at once with its key path. Paths are relative to the recipe's folder. `shardkit build --set KEY=VALUE` overrides
any key, for example `--set pack.sequence_length=4096`.

Shorthands make the same recipe, with the same digest, as the long forms: `filters: [gopher_quality, fineweb]` (a filter with its
defaults, or a profile), `dedup: {exact: true, near: 0.8}`, `inputs: data/*.jsonl`, `output: out`; and where a list is expected,
one item needs no brackets.

Editors complete and check recipes with the JSON Schema:

```bash
python -c "import json; from shardkit.writers.recipe.recipe import recipe_schema; print(json.dumps(recipe_schema()))" > recipe.schema.json
```

Put `# yaml-language-server: $schema=recipe.schema.json` on the first line of a recipe.
[Recipes to copy](../../recipes/README.md) are in the repository.
"""
FILTERS_HEAD = """\
## filters[]

Each entry of `filters`, and of `steps`, is one of the filters below, or a profile. Filters run in the order given, and the first rule that
fails drops the document. Words are separated by white space (`str.split`) unless a filter says `words: spacy:en`, which is
what datatrove counts: with it outcomes equal those of datatrove as released. *Editors* change documents; later filters judge the edited text.
"""
BY_LANGUAGE = """\
### by_language

{meaning}

```yaml
filters:
  - language: {{model: glotlid.bin}}
    by_language: {{deu_Latn: {{threshold: 0.8}}, zho_Hans: {{threshold: 0.7}}, default: {{threshold: 0.9}}}}
  - length: {{min_words: 20}}
    by_language: {{zho_Hans: {{min_words: 0, min_chars: 100}}}}
```

A document is judged by the settings of its language, which a `language` filter has found before: those of the entry, with the
keys of that language in their place. Other languages are judged by the entry's own settings, or with the keys of `default`.
Beside `language` itself the key is `threshold`; then languages that are not named are dropped, unless there is a `default` or
`languages` names them. `by_language: configs/*.yml` reads `configs/deu_Latn.yml` and the others, which may have the keys of
FineWeb2's published configurations; each filter takes its own. `{{files: configs/*.yml, deu_Latn: {{…}}}}` has both files and
settings that win over them. Filters that edit documents have the same settings for all languages.
"""
PROFILES_HEAD = """\
### profile

A named list of filters: `filters: [{profile: fineweb}]`. A profile can be combined with further filters.

| profile | filters, in order |
|---|---|
"""
CLI_HEAD = """\
# Command-line reference

Every command and option, generated from the parsers. `shardkit COMMAND --help` prints the same text, and
`python -m shardkit` is the same program. Results go to stdout and messages to stderr; `--json` prints the result as JSON.
The exit status is 0 for success, 1 for failure, 2 for misuse (wrong arguments or an invalid recipe) and 130 after Ctrl-C.
"""
COMPLETION = """\
## Completion

`shardkit --completion SHELL` prints a script that completes verbs, options, choices and keys in bash, zsh or fish; write it again after an update.
For bash, write it to `~/.local/share/bash-completion/completions/shardkit`, for fish to `~/.config/fish/completions/shardkit.fish`. In zsh, write
it to a file that `~/.zshrc` reads with `source`.
"""


def recipe_reference() -> str:
    """The page of recipe keys: sections of the recipe, then filters and profiles."""
    schema = Recipe.model_json_schema(mode="validation")
    models = schema["$defs"]
    filters = models.pop("FilterEntry")["properties"]
    names = [name for name in filters if name not in ("profile", "by_language")]
    ours = {name: filter_sections(name, filters[name], models) for name in names}
    in_filters = {key for placed in ours.values() for key, _ in placed}
    rest = {key: place for key, place in sections(schema, models) if is_step(place)}
    rest |= {key: place for key, place in reversed([*sections(schema, models)]) if not is_step(place)}
    rest = {key: place for key, place in rest.items() if key not in in_filters}
    for key, place in [*rest.items(), *(one for placed in ours.values() for one in placed)]:
        models[key]["place"] = place
    parts = [RECIPE_HEAD, "## Top level\n", table(schema, models)]
    for key, place in sections(schema, models):
        if rest.get(key) == place:
            parts += [f"## {place}\n", summary(models[key]), table(models[key], models)]
    parts.append(FILTERS_HEAD)
    for placed in ours.values():
        for key, place in placed:
            level = "####" if "." in place else "###"
            parts += [f"{level} {place}\n", summary(models[key]), table(models[key], models)]
    rows = [f"| `profile: {name}` | {', '.join(map(entry_text, PROFILES[name]))} |" for name in PROFILES]
    parts.append(BY_LANGUAGE.format(meaning=meaning(filters["by_language"])))
    return "\n".join([*parts, PROFILES_HEAD + "\n".join(rows), ""])


def is_step(place: str) -> bool:
    """Return whether a key path leads into `steps`, whose entries other sections tell."""
    return place.startswith("steps[].")


def filter_sections(name: str, field: Json, models: Json) -> list[tuple[str, str]]:
    """(model, key path) of a filter and of each mapping below it."""
    key = reference(field) or ""
    return [(key, name), *sections(models[key], models, f"{name}.")]


def sections(model: Json, models: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(model, key path) of each mapping below a model, depth first."""
    for name, field in model["properties"].items():
        key = reference(field)
        if key in models and "properties" in models[key]:
            place = f"{prefix}{name}" + ("[]" if is_list(field) else ".name" if is_mapping(field) else "")
            yield key, place
            yield from sections(models[key], models, f"{place}.")


def alternatives(field: Json) -> Iterator[Json]:
    """What a value may be, nested choices flattened; null, which the default column shows, is left out."""
    if "anyOf" in field:
        for choice in field["anyOf"]:
            yield from alternatives(choice)
    elif field.get("type") != "null":
        yield field


def reference(field: Json) -> str | None:
    """The model that a field holds, or of which it holds a list, or a mapping from names."""
    for choice in alternatives(field):
        values = choice.get("additionalProperties")
        for inner in alternatives(choice.get("items", values if isinstance(values, dict) else choice)):
            if "$ref" in inner:
                return str(inner["$ref"]).rpartition("/")[2]
    return None


def is_list(field: Json) -> bool:
    return any("items" in choice for choice in alternatives(field))


def is_mapping(field: Json) -> bool:
    return any(isinstance(choice.get("additionalProperties"), dict) for choice in alternatives(field))


def table(model: Json, models: Json) -> str:
    """The keys of a mapping, as a table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    required = model.get("required", ())
    for name, field in model["properties"].items():
        default = "required" if name in required else f"`{short(field.get('default'), models, field)}`"
        lines.append(f"| `{name}` | {type_words(field, models)} | {default} | {meaning(field)} |")
    return "\n".join(lines) + "\n"


def short(value: object, models: Json, field: Json) -> str:
    """A default as YAML writes it."""
    if isinstance(value, dict) and reference(field) in models:
        return "{}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(short(each, models, {}) for each in value) + "]"
    if isinstance(value, int) and field and type_words(field, models).startswith("bytes"):
        return f"{value >> 20}MiB" if value % (1 << 20) == 0 else f"{value // 10**9}GB"
    return f"{value}".replace("|", "&#124;")


def type_words(field: Json, models: Json) -> str:
    """What a value may be, in words."""
    words = [kind_words(choice, models) for choice in alternatives(field)]
    if {"integer", "text"} <= {word.split(",")[0] for word in words}:
        is_count = any(one.get("minimum") == 1 for one in alternatives(field) if one.get("type") == "integer")
        return "count, such as `10B`" if is_count else "bytes, or a size such as `64MiB`"
    words.sort(key=lambda word: word.startswith("list"))
    return " or ".join(dict.fromkeys(words))


def kind_words(choice: Json, models: Json) -> str:
    """One alternative of a value, in words."""
    if "enum" in choice or "const" in choice:
        values = choice.get("enum", [choice.get("const")])
        return " or ".join(f"`{short(each, models, {})}`" for each in values)
    if (key := reference(choice)) is not None and "properties" in models.get(key, {"properties": {}}):
        place = str(models[key].get("place", "")) if key in models else "filters"
        words = f"[mapping](#{anchor(place)})" if place else "mapping"
        return f"list: {words}" if "items" in choice else words
    kind = choice.get("type", "any")
    kinds: list[str] = kind if isinstance(kind, list) else [kind]
    names = {"boolean": "true or false", "array": "list", "object": "mapping", "string": "text"}
    words = " or ".join(names.get(kind, kind) for kind in kinds)
    if kinds == ["array"] and (inner := list(alternatives(choice.get("items", {})))):
        words = "list: " + " or ".join(dict.fromkeys(kind_words(each, models) for each in inner if each))
    return words.removesuffix(": ") + bounds(choice)


def bounds(field: Json) -> str:
    """The range of a number."""
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is None or high is None or high >= 1 << 32:
        return "" if low is None else f", {'at least' if 'minimum' in field else 'above'} {low:,}"
    return f", {'' if 'minimum' in field else 'above '}{low:,} to {high:,}"


def anchor(place: str) -> str:
    """The anchor that renderers give to a heading."""
    return place.replace("[]", "").replace(".", "")


def summary(model: Json) -> str:
    return cell(model.get("description", "")) + "\n"


def meaning(field: Json) -> str:
    return cell(field.get("description", ""))


def cell(text: str) -> str:
    """Text for a table or paragraph: one line, and no markup of its own."""
    for mark in "|*<":
        text = text.replace(mark, f"&#{ord(mark)};")
    return " ".join(text.split())


def entry_text(entry: Any) -> str:
    [(name, settings)] = entry.items()
    given = ", ".join(f"`{key}: {short(value, {}, {})}`" for key, value in settings.items())
    return f"[`{name}`](#{anchor(name)})" + (f" with {given}" if given else "")


def cli_reference() -> str:
    """The page of commands."""
    [verbs] = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    every = [f"| {spelled(one)} | {cell(str(one.help))} |" for one in shared_parser()._actions]
    parts = [CLI_HEAD, "## Options of every verb\n\n| option | |\n|---|---|\n" + "\n".join(every) + "\n"]
    parts.append(COMPLETION)
    for name in sorted(verbs.choices):
        parts += command(verbs.choices[name], "##")
    [storage] = [keys for keys in verbs.choices["build"].key_options() if keys.dest == "storage"]
    return "\n".join([*parts, "## Keys of `--storage`\n", key_table(storage)])


def key_table(keys: Keys) -> str:
    """The keys of an option, and what they mean."""
    rows = [
        f"| `{key}={setting.metavar.replace('|', BAR)}` | {cell(setting.help)} |"
        for key, setting in keys.known.items()
    ]
    return "\n".join([f"| keys of `{keys.option_strings[0]}` | |", "|---|---|", *rows, ""])


def command(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """The heading, text and tables of a command, and of those below it."""
    yield f"{level} {parser.prog}\n"
    yield synopsis(parser) + "\n"
    yield paragraphs(parser.description or "") + "\n"
    inner: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                inner = dict(action.choices)
            elif not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS:
                rows.append(f"| {spelled(action)} | {cell(expanded(parser, action))} |")
        if rows:
            title = (
                "" if group.title in ("positional arguments", "options", None) else f"**{group.title}**\n\n"
            )
            yield title + f"| {heading(group.title)} | |\n|---|---|\n" + "\n".join(rows) + "\n"
    if isinstance(parser, Parser):
        yield from (key_table(keys) for keys in parser.key_options() if keys.dest != "storage")
    if parser.epilog:
        yield paragraphs(parser.epilog) + "\n"
    for each in inner.values():
        yield from command(each, level + "#")


def heading(title: str | None) -> str:
    return "argument" if title == "positional arguments" else "option"


def synopsis(parser: argparse.ArgumentParser) -> str:
    places = [a for a in parser._actions if not a.option_strings]
    return "```text\n" + " ".join([parser.prog, "[options]", *(_place(a) for a in places)]) + "\n```"


def _place(action: argparse.Action) -> str:
    word = action.metavar if isinstance(action.metavar, str) else action.dest
    word = "KIND ..." if isinstance(action, argparse._SubParsersAction) else word
    many = {"*": f"[{word} ...]", "+": f"{word} [{word} ...]", "?": f"[{word}]"}
    return many.get(str(action.nargs), word)


def spelled(action: argparse.Action) -> str:
    """An option with its value, as code."""
    if not action.option_strings:
        return f"`{_place(action)}`"
    value = ""
    if action.nargs != 0:
        word = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        value = " " + (" ".join(word) if isinstance(word, tuple) else word)
        value += f" [{word} ...]" if action.nargs in ("+", "*") else ""
    return "`" + ", ".join(name + value for name in action.option_strings).replace("|", BAR) + "`"


def expanded(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def paragraphs(text: str) -> str:
    return "\n\n".join(cell(part) for part in text.split("\n\n"))


def main() -> None:
    for name, text in zip(PAGES, (recipe_reference(), cli_reference()), strict=True):
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
