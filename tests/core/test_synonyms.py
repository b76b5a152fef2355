"""Mistakes that users make, in commands, recipes and Python: the error names the next step."""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shardkit as sk
from shardkit import synonyms
from shardkit.cli.main import VERBS, main, make_parser, shared_parser
from shardkit.errors import PathError, RecipeError
from shardkit.formats.mds import MdsWriter
from shardkit.hints import closest
from shardkit.synonyms import RECIPE
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe.problems import _model_in
from shardkit.writers.recipe.recipe import Recipe
from support.loader_data import make_dataset

INPUTS = {"inputs": [{"path": "a.jsonl"}], "tokenizer": {"path": "t.json"}, "output": {"path": "out"}}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data of several kinds and no recipe that can be built."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "row.jsonl").write_text('{"text": "a"}\n')  # one line is also YAML
    (tmp_path / "long.jsonl").write_text(f'{{"url": "https:/a/b", "text": "{"word/ " * 900}"}}\n' * 2)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "t.parquet").write_bytes(b"PAR1\x00\x9b" * 300_000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text\n")
    (tmp_path / "list.txt").write_text("texts/a.txt\n")
    (tmp_path / "wet.paths.gz").write_bytes(gzip.compress(b"crawl-data/a.gz\n"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "web.yaml").write_text("inputs: [a.jsonl]\n")
    make_dataset(tmp_path / "built", "mds")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        *(
            (f"build {name}", f"`shardkit init {name}`")
            for name in ("rows.jsonl", "row.jsonl", "rows.jsonl.gz", "long.jsonl")
        ),
        *((f"build {name}", f"`shardkit init {name}`") for name in ("t.parquet", "texts", "texts/a.txt")),
        ("build built", "`shardkit info built`"),
        ("build built/index.json", "`shardkit info built`"),
        ("build list.txt", "`inputs: [{path: list.txt, list: true}]`"),
        ("build wet.paths.gz", "list: true"),
        ("build project", "give the recipe in it: project/web.yaml"),
        ("build none.yaml", "`shardkit init DATA`"),
        ("clean rows.jsonl", "`shardkit init rows.jsonl`"),
        ("dedup-index texts index", "`shardkit init texts`"),
        ("init project/web.yaml", "`shardkit build project/web.yaml`"),
        ("info project/web.yaml", "for a recipe: shardkit build"),
        ("upload built s3:bucket", "s3://"),
    ],
)
def test_a_command_on_something_else_names_the_command_for_it(
    command: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) in (1, 2)
    out, err = capfd.readouterr()
    assert says in err
    assert out == ""
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("build", "`shardkit init DATA` writes one"),
        ("build a b", "unexpected argument 'b'; the recipe names all data"),
        ("build r seed=5", "did you mean --set seed=5?"),
        ("build r --input x", "--set inputs=PATH"),
        ("build r --force", "did you mean --replace?"),
        ("build r --resume", "continues where it stopped"),
        ("build r -j 4", "did you mean --workers?"),
        ("build r --num_workers=4", "did you mean --workers?"),
        ("build r -o x", "did you mean --output?"),
        ("build r --sequence-length 4", "--set pack.sequence_length=…"),
        ("build r --seed 5", "--set seed=…"),
        ("build r --seq-len 5", "`pack.sequence_length`"),
        ("build r --config-name x", "the recipe, without an option"),
        ("trace out --search word", "the page Search of `shardkit view PATH`"),
        ("build r --logfile x", "did you mean --log-file?"),
        ("build r --qiet", "did you mean --quiet?"),
        ("build r --max-samples 9", "did you mean --limit?"),
        ("upload a b -j 4", "did you mean --threads?"),
        ("upload a b --storage anon=true", "`anonymous`"),
        ("plan r.yaml", "unknown kind 'r.yaml'; give train or build"),
        ("head out", "`view`"),
        ("stats out", "`info`"),
        ("ls out", "`info`"),
        ("merge a b", "`StreamingLoader([Stream("),
        ("run r.yaml", "`build`"),
        ("tokenize r.yaml", "`shardkit init DATA`"),
        ("train out", "`StreamingLoader`"),
        ("push out", "`upload`"),
        ("lint r.yaml", "`build RECIPE --explain`"),
        ("why out", "`trace PATH --why`"),
        ("dropped out", "`trace PATH --dropped`"),
        ("help", "`shardkit --help`"),
        ("version", "`shardkit --version`"),
        ("completion", "`shardkit --completion SHELL`"),
        ("trian out", "unknown verb 'trian'; see"),  # neither "trace" nor anything else is meant
        ("inti x", "did you mean init?"),
        ("dedup_index x", "did you mean dedup-index?"),
    ],
)
def test_an_unknown_word_of_a_command_is_answered(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("inputs[0].text_column", "`text`, the field"),
        ("inputs[0].sample", "`amounts`"),
        ("inputs[0].name", "`source`"),
        ("inputs[0].compression", "not needed"),  # "completion" is spelled alike
        ("text_column", "`inputs[].text`"),
        ("max_tokens", "`amounts`"),
        ("workers", "--workers N"),  # "work" is a key
        ("eos", "did you mean 'tokenizer.eos'?"),
        ("sequence_length", "did you mean 'pack.sequence_length'?"),
        ("compression", "'output.compression'"),
        ("language", "'filters[].language'"),
        ("storage", "did you mean 'inputs[].storage'?"),
        ("defaults", "OmegaConf.to_container"),
        ("dataset", "`inputs`"),
        ("validation", "`split`"),
        ("log_level", "--log-file FILE"),
        ("quux", "known keys: amounts, "),
        ("dedup.minhash", "`near`"),
        ("dedup.ngram", "did you mean 'near.minhash.ngram'?"),
        ("dedup.keep", "did you mean 'url.keep' or 'lines.keep'?"),
        ("dedup.near.threshold", "`similarity`"),
        ("dedup.near.num_perm", "`minhash.permutations`"),
        ("tokenizer.model", "`path`"),
        ("tokenizer.eos_token", "did you mean 'eos'?"),
        ("pack.max_seq_len", "`sequence_length`"),
        ("output.size_limit", "`shard_bytes`"),
        ("output.overwrite", "--replace"),
    ],
)
def test_an_unknown_key_of_a_recipe_is_answered(path: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        sk.load_recipe(INPUTS, [f"{path}=1"])
    assert f"{path}: unknown key; " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lid", "in shardkit: `language`"),
        ("min_words", "`length`"),
        ("regex", "`python`"),
        ("pii_removal", "did you mean 'pii'?"),
        ("quality", "did you mean 'gopher_quality' or 'fineweb_quality' or "),
        ("quux", "known: length, "),
    ],
)
def test_an_unknown_filter_is_answered(name: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        sk.load_recipe({**INPUTS, "filters": [name]})
    assert f"there is no filter {name!r}; " in str(caught.value)
    assert says in str(caught.value)


CALLS = [
    ("sk.StreamingLoader('built', batch_size=2, seq_len=5)", "`pack.sequence_length`"),
    ("sk.StreamingLoader('built', batch_size=2, probabilities=[1])", "`Stream(path, weight=…)`"),
    ("sk.StreamingLoader('built', batch_size=2, consumed_samples=9)", "`loader.load_state_dict(state)`"),
    ("sk.StreamingLoader('built', batch_size=2, infinite=True)", "`endless=True`"),
    ("sk.StreamingLoader('built', batch_size=2, streaming=True)", "not needed"),  # not "storage"
    ("sk.StreamingLoader({'built': 0.7}, batch_size=2)", "[Stream(path, weight=0.7), …]"),
    ("sk.build('r.yaml', 'out', 4)", "give other arguments by name, such as tokenizer=…"),
    ("sk.build('r.yaml', num_workers=2)", "`workers`"),
    ("sk.build('r.yaml', overwrite=True)", "`replace=True`"),
    ("sk.build('r.yaml', seed=3)", 'overrides=["seed=…"]'),
    ("sk.build(inputs='rows.jsonl')", '{"inputs": …}'),
    ("sk.build(['rows.jsonl'])", 'needs output="out" and tokenizer="tokenizer.json"'),
    ("sk.build(x for x in 'ab')", 'needs output="out" and tokenizer="tokenizer.json"'),
    ("sk.build('texts')", 'needs output="out" and tokenizer="tokenizer.json"'),
    ("sk.convert([{'a': 1}], 'out')", "`sk.MdsWriter`"),
    ("sk.open('built', split='train')", "the sub-folder"),
    ("sk.open('built').take(5)", "`dataset.head(n)`"),
    ("sk.open('built').to_torch()", "`dataset[:].to_torch()`"),
    ("sk.open('built').num_rows", "`len(dataset)`"),
    ("sk.open('built')['x']", "dataset[0]['x'] is the value of one row"),
    ("sk.open('built').columnz", "no attribute 'columnz'"),
    ("sk.MDSWriter", "`MdsWriter`"),
    ("sk.load_dataset", "`open(path)`"),
    ("sk.uplaod", "did you mean upload?"),
    ("sk.view", "`shardkit view`"),
    ("MdsWriter('new', columns={'a': 'int'}, size_limit=9)", "`shard_bytes`"),
    ("MdsWriter(out='new', columns={'a': 'int'})", "the folder, as the first argument"),
    ("MdsWriter('new', columns=['a'])", "must be a mapping"),
    ("sk.upload('built', 's3:bucket/x')", "s3://"),
    ("sk.upload('built', 'x', overwrite=True)", "`replace=True`"),
    ("sk.download('s3://b/x', 'x', num_workers=3)", "`threads`"),
    ("sk.verify('built', quik=True)", "did you mean quick?"),
    ("sk.convert('a', 'b', shard_bytes=9)", "`output=OutputOptions(shard_bytes=…)`"),
    ("sk.convert('a', 'b', size_limit=9)", "`shard_bytes`"),
    ("sk.pack('a', 'b', sequence_length=9)", 'overrides=["pack.sequence_length=…"]'),
    ("sk.trace('built', index=9)", "`row`"),
    ("sk.trace('built', sourse='web')", "did you mean source?"),
    ("sk.StorageOptions(anon=True)", "`anonymous`"),
    ("sk.StorageOptions(aws_access_key_id='k')", "AWS_ACCESS_KEY_ID"),
    ("sk.StorageOptions(connection=3)", "did you mean connections?"),
]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("code", "says"), CALLS)
def test_a_mistake_in_python_is_answered(code: str, says: str) -> None:
    with pytest.raises((TypeError, AttributeError, RecipeError, PathError)) as caught:
        eval(code, {"sk": sk, "MdsWriter": MdsWriter})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("input", ["output"], []),
        ("workers", ["seed", "stages"], []),
        ("train", ["trace", "build"], []),
        ("force", ["workers"], []),
        ("--worker", ["--workers", "--work"], ["--workers"]),
        ("eso", ["eos", "bos"], ["eos"]),
        ("text_key", ["text", "columns"], ["text"]),
        ("endpoint", ["endpoint_url", "region"], ["endpoint_url"]),
        ("prefetch", ["prefetch_batches", "prefetch_bytes"], ["prefetch_batches", "prefetch_bytes"]),
    ],
)
def test_only_what_is_nearly_the_same_word_is_guessed(word: str, known: list[str], meant: list[str]) -> None:
    assert closest(word, known) == meant


def test_the_tables_name_only_what_exists() -> None:
    """Each verb, option and key in a sentence is one of ours, and no word that we know is in its table."""
    [verbs] = [one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    options = {option for parser in _parsers(verbs.choices) for option in parser._option_string_actions}
    options |= {option for action in shared_parser()._actions for option in action.option_strings}
    sentences = [sentence for table in _tables() for sentence in table.values()]
    for sentence in sentences:
        for verb in re.findall(r"shardkit ([a-z][a-z-]+)", sentence):
            assert verb in VERBS, sentence
        for option in re.findall(r"--[a-z-]+", sentence):
            assert option in options | {"--help", "--version", "--completion"}, sentence
    assert {option for ours in synonyms.OPTIONS.values() for option in ours.split()} <= options
    assert not synonyms.VERBS.keys() & VERBS.keys()
    assert {verb for text in synonyms.VERBS.values() for verb in re.findall(r"^`([a-z-]+)[` ]", text)} <= {
        *VERBS, "shardkit", "split",
    }  # fmt: skip
    assert not synonyms.FILTERS.keys() & FilterEntry.model_fields.keys()
    assert not synonyms.PACKAGE.keys() & {*sk.__all__}
    for place, table in RECIPE.items():
        owner = _model_at(Recipe, place)
        assert not table.keys() & owner.model_fields.keys(), place
        for key in (key for text in table.values() for key in re.findall(r"^`([a-z_.\[\]]+)`", text)):
            assert _model_at(owner, key) or _model_at(Recipe, key), f"{place}: {key}"


def _parsers(parsers: Mapping[str, argparse.ArgumentParser]) -> Iterator[argparse.ArgumentParser]:
    for parser in parsers.values():
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from _parsers(action.choices)


def _tables() -> list[Mapping[str, str]]:
    named = (
        "FOREIGN",
        "BUILD",
        "TRANSFER",
        "STORAGE",
        "TRACE",
        "OPEN",
        "WRITER",
        "DATASET",
        "PACKAGE",
        "FILTERS",
    )
    others = (synonyms.VERBS, synonyms.OPTION_SENTENCES)
    return [*(getattr(synonyms, name) for name in named), *others, *RECIPE.values()]


def _model_at(owner: Any, path: str) -> Any:
    """The model of the mapping at a path of keys, or the last key's scalar field; None if there is none."""
    for key in filter(None, path.replace("[]", "").split(".")):
        field = owner.model_fields.get(key) if hasattr(owner, "model_fields") else None
        if field is None:
            return None
        owner = _model_in(field.annotation) or field
    return owner
