"""Scripts that complete commands in bash, zsh and fish, made from the parsers.

A script is text with all verbs, options and choices in it, so that a shell answers without starting Python.
After `shardkit VERB` come the verb's options, then the choices or keys of an option that has some, and names
of files otherwise. `plan` has verbs of its own. zsh runs the script of bash by `bashcompinit`, which has no
`compopt`: there, a function says for each word whether a space follows.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping

from shardkit.cli.declared import Keys

_BASH = """\
_shardkit() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command="" each offered=""
  for each in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case "$command $each" in
{commands}
    esac
  done
  case "$command $before" in
{values}
  esac
  if [[ -z $offered && $word == -* ]]; then
    case "$command" in
{options}
    esac
  elif [[ -z $offered ]]; then
    case "$command" in
{verbs}
    esac
  fi
  COMPREPLY=($(compgen -W "$offered" -- "$word"))
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2> /dev/null
  return 0
}}
complete -o default -o bashdefault -F _shardkit shardkit
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
_ZSH_END = """\
_shardkit_zsh() {{
  local spacing=()
  [[ ${{words[CURRENT-1]}} == ({keyed}) ]] && spacing=(-o nospace)
  _bash_complete -o default -o bashdefault $spacing -F _shardkit
}}
compdef _shardkit_zsh shardkit
"""


def script(shell: str, parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> str:
    """Return the script for a shell: "bash", "zsh" or "fish"; every verb takes the options of `shared`."""
    commands = dict(_commands(parser))
    if shell == "fish":
        return "".join(_fish(commands, shared))
    bash = _bash(commands, shared)
    if shell == "bash":
        return bash
    actions = [action for parser in commands.values() for action in parser._actions]
    keyed = {option for action in actions if isinstance(action, Keys) for option in action.option_strings}
    return _ZSH + bash + _ZSH_END.format(keyed="|".join(sorted(keyed)))


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield (verb and kind, parser) of every parser, the outer ones first."""
    yield words, parser
    for name, inner in _verbs(parser).items():
        yield from _commands(inner, (*words, name))


def _verbs(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    found = [one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return found[0] if found else {}


def _options(parser: argparse.ArgumentParser, shared: argparse.ArgumentParser) -> list[argparse.Action]:
    own = [one for one in parser._actions if one.option_strings]
    given = {option for one in own for option in one.option_strings}
    return own + [one for one in shared._actions if not given.intersection(one.option_strings)]


def _values(action: argparse.Action) -> list[str]:
    """Return the words that may follow an option: its choices, or its keys with "="."""
    if isinstance(action, Keys):
        return [f"{key}=" for key in action.known]
    return [str(choice) for choice in action.choices or ()]


def _bash(
    commands: Mapping[tuple[str, ...], argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> str:
    nested, values, options, verbs = [], [], [], []
    for words, parser in commands.items():
        command = "".join(f" {word}" for word in words)
        if words:
            outer = "".join(f" {word}" for word in words[:-1])
            nested.append(f'      "{outer} {words[-1]}") command="{command}" ;;')
        own = _options(parser, shared)
        for action in own:
            pattern = "|".join(f'"{command} {option}"' for option in action.option_strings)
            if found := _values(action):
                values.append(f"    {pattern}) offered={shlex.quote(' '.join(found))} ;;")
            elif action.nargs != 0:
                values.append(f"    {pattern}) return ;;")
        names = [option for action in own for option in action.option_strings]
        options.append(f'      "{command}") offered={shlex.quote(" ".join(names))} ;;')
        if inner := _verbs(parser):
            verbs.append(f'      "{command}") offered={shlex.quote(" ".join(inner))} ;;')
    parts = {"commands": nested, "values": values, "options": options, "verbs": verbs}
    return _BASH.format(**{name: "\n".join(lines) for name, lines in parts.items()})


def _fish(
    commands: Mapping[tuple[str, ...], argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> Iterator[str]:
    outer_of = {words[-1]: words[0] for words in commands if len(words) > 1}
    for words, parser in commands.items():
        inner = _verbs(parser)
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        if len(words) == 1 and words[0] in outer_of:  # `build` is a verb and a kind of `plan`
            seen += f"; and not __fish_seen_subcommand_from {outer_of[words[0]]}"
        if inner:
            no_inner = f"not __fish_seen_subcommand_from {' '.join(inner)}"
            where = f"{seen}; and {no_inner}" if words else no_inner
        else:
            where = seen
        condition = f"complete -c shardkit -n {shlex.quote(where)}"
        verbs = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        for action in verbs._choices_actions if verbs is not None else ():
            yield f"{condition} -f -a {action.dest} -d {shlex.quote(_first(action.help))}\n"
        for action in _options(parser, shared):
            flags = [
                f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
                for option in action.option_strings
            ]
            value = "" if action.nargs == 0 else " -r"
            if found := _values(action):
                value = f" -x -a {shlex.quote(' '.join(found))}"
            yield f"{condition} {' '.join(flags)}{value} -d {shlex.quote(_first(action.help))}\n"


def _first(text: str | None) -> str:
    """Return the beginning of a help text, without its default."""
    return (text or "").partition(" (default")[0].partition(";")[0].replace("%%", "%")
