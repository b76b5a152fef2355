"""Conversations: text, ids and masks are those of transformers, and what cannot be proved is refused."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

import shardkit
from shardkit.errors import BuildError, RecipeError
from shardkit.loaders import StreamingLoader
from shardkit.tokens.chat import ChatError, ChatFormat, pair_of, parts_of, render_chat
from shardkit.writers import build
from shardkit.writers.recipe.recipe import recipe_from_mapping
from support.small_build import EOS, train_bpe

IM = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
FORGETTING = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}" + CHATML
TALKS: list[list[dict[str, str]]] = [
    [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is a <|im_end|> test."},
    ],
    [
        {"role": "system", "content": "Be brief, café 你好"},
        {"role": "user", "content": "one 👩‍👩‍👧"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second\n\nanswer "},
    ],
    [{"role": "user", "content": "  spaces  "}, {"role": "assistant", "content": "ok"}],
]
WORDS = ["what is it first second answer user assistant system one two spaces brief be test tools name " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer."""
    made = tmp_path_factory.mktemp("chat")
    train_bpe(WORDS, vocabulary=400, special=(EOS, *IM)).save(str(made / "tokenizer.json"))
    return made


def chat_of(template: str) -> ChatFormat:
    return ChatFormat(template, (EOS, *IM), {}, EOS)


def masked_text(rendered: Any) -> list[str]:
    return [part for part, flags in parts_of(rendered.text, rendered.marks) if flags & 2]


# Of the structure of published templates, which are not copied: what is written depends on what follows.
ENDED = CHATML + "{% if not add_generation_prompt %}{{ '" + EOS + "' }}{% endif %}"  # Phi-3
THINKING = (  # Qwen3: reasoning of the answer to the last question only
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + (m.why or '') }}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
OPENING = (  # DeepSeek: the prompt opens reasoning that the answers of records do not have
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '' }}{{ m.content }}"
    "{{ '<|im_end|>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' }}{% generation %}{{ m.content }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ONE, TWO = TALKS[2], TALKS[1]
WHY = [ONE[0], ONE[1] | {"why": "so"}]


@pytest.mark.parametrize(
    ("template", "talk", "train_on", "variables", "trained"),
    [
        # The end of the text belongs to the last answer, and so does the line end before it.
        (ENDED, TWO, "assistant", {}, "first answer<|im_end|>second\n\nanswer <|im_end|>\n"),
        (ENDED, TWO[:-1], "assistant", {}, "first answer<|im_end|>"),
        (ENDED, TWO, "last_assistant", {}, "second\n\nanswer <|im_end|>\n"),
        (THINKING, ONE, "assistant", {}, "<think>\n\n</think>\n\nok<|im_end|>"),
        (THINKING, ONE, "assistant", {"enable_thinking": False}, "ok<|im_end|>"),
        (
            THINKING,
            WHY,
            "assistant",
            {},
            "<think>\nso\n</think>\n\nok<|im_end|>",
        ),
        (THINKING, TWO, "assistant", {}, None),
        (THINKING, TWO, "last_assistant", {}, "<think>\n\n</think>\n\nsecond\n\nanswer <|im_end|>"),
        (OPENING, ONE, "assistant", {}, None),
        (OPENING, TWO, "last_assistant", {}, None),
        (BLOCKS, TWO, "assistant", {}, "first answer<|im_end|>second\n\nanswer <|im_end|>"),
    ],
)
def test_templates_of_published_structures_have_the_masks_that_can_be_proved(
    template: str, talk: Any, train_on: str, variables: dict[str, Any], trained: str | None
) -> None:
    if trained is None:
        with pytest.raises(ChatError, match=r"add the blocks.*last_assistant") as refused:
            render_chat(chat_of(template), talk, None, variables, train_on=train_on)
        assert refused.value.reason == "unproved_mask"
    else:
        rendered = render_chat(chat_of(template), talk, None, variables, train_on=train_on)
        assert "".join(masked_text(rendered)) == trained


def test_what_is_trained_on_is_proved_by_rendering_beginnings() -> None:
    rendered = render_chat(chat_of(CHATML), TALKS[1])
    assert rendered.text.startswith("<|im_start|>system\nBe brief")
    assert masked_text(rendered) == ["first answer", "<|im_end|>", "second\n\nanswer ", "<|im_end|>"]
    last = render_chat(chat_of(CHATML), TALKS[1], train_on="last_assistant")
    assert masked_text(last) == ["second\n\nanswer ", "<|im_end|>"]
    whole = render_chat(chat_of(CHATML), TALKS[1], train_on="all")
    assert "".join(masked_text(whole)) == whole.text


def test_both_ways_to_a_mask_agree() -> None:
    for talk in TALKS:
        by_block, by_proof = (render_chat(chat_of(template), talk) for template in (GENERATION, CHATML))
        assert by_block == by_proof


@pytest.mark.parametrize(
    ("template", "talk", "reason", "problem"),
    [
        (
            FORGETTING,
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>x</think>b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
            "unproved_mask",
            "writes message 1 differently when other messages follow it",
        ),
        (CHATML, [{"role": "user"}], "bad_messages", "the chat template refuses the conversation"),
        (CHATML, "text", "bad_messages", "the conversation is not a list"),
        (CHATML, [{"content": "x"}], "bad_messages", "an object with a role"),
        (CHATML, [{"role": "user", "content": "\ufdd1"}], "bad_messages", "noncharacter"),
        ("{{ strftime_now('%d') }}", TALKS[0], "bad_messages", "could not be repeated"),
        ("{{ raise_exception('roles must alternate') }}", TALKS[0], "bad_messages", "roles must alternate"),
        (CHATML.replace("<|im_end|>", EOS), TALKS[1], "eos_inside", "set tokenizer.eos to another"),
        ("{{ ''.__class__.__mro__ }}", TALKS[0], "bad_messages", "refuses the conversation"),
    ],
)
def test_what_cannot_be_rendered_or_proved_is_refused(
    template: str, talk: Any, reason: str, problem: str
) -> None:
    with pytest.raises(ChatError, match=problem) as refused:
        render_chat(chat_of(template), talk)
    assert refused.value.reason == reason


def test_tools_are_rendered_as_json() -> None:
    rendered = render_chat(chat_of(TOOLS), TALKS[0], [{"name": "größe<|im_start|>"}])
    assert '[{"name": "größe<|im_start|>"}]' in rendered.text
    specials = [part for part, flags in parts_of(rendered.text, rendered.marks) if flags & 1]
    assert specials.count("<|im_start|>") == 3, "that of the tool's name is text"


def test_a_prompt_is_masked_and_its_completion_is_not() -> None:
    rendered = pair_of("two and two", " is four")
    assert parts_of(rendered.text, rendered.marks) == [("two and two", 0), (" is four", 2)]


def recipe_of(folder: Path, place: Path, template: str, **changes: Any) -> dict[str, Any]:
    (place / "chat.jinja").write_text(template)
    return {
        "inputs": [{"path": str(place / "*.jsonl"), "messages": "messages"}],
        "tokenizer": {
            "path": str(folder / "tokenizer.json"),
            "eos": EOS,
            "chat_template": str(place / "chat.jinja"),
        },
        "pack": {"sequence_length": 96},
        "output": str(place / "out"),
    } | changes


def decoder_of(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def documents(dataset: shardkit.Dataset) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids, mask) of every document: rows are cut behind eos."""
    eos = dataset.card.tokenizer.eos_id if dataset.card is not None else None
    found = set()
    for sample in dataset:
        tokens, mask = (np.asarray(sample[name]) for name in ("tokens", "loss_mask"))
        begin = 0
        for end in np.flatnonzero(tokens == eos).tolist():
            if end > begin:
                found.add((tuple(tokens[begin : end + 1].tolist()), tuple(mask[begin : end + 1].tolist())))
            begin = end + 1
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("template", [GENERATION, CHATML])
def test_ids_and_masks_are_those_of_transformers(
    folder: Path, tmp_path: Path, template: str, inline_builds: None
) -> None:
    talks = [talk for talk in TALKS if not any("<|im_end|>" in m["content"] for m in talk)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    made = build(recipe_of(folder, tmp_path, template), workers=1, progress=False)
    load: Any = PreTrainedTokenizerFast
    peer = load(tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS)
    expected = set()
    for talk in talks:
        theirs: Any = peer.apply_chat_template(
            talk, chat_template=GENERATION, return_dict=True, return_assistant_tokens_mask=True
        )
        eos = peer.convert_tokens_to_ids(EOS)
        # What follows the last answer is the template's line end: it is not trained on, and so is not eos.
        expected.add(((*theirs["input_ids"], eos), (*theirs["assistant_masks"], 0)))
    assert documents(made.open()) == expected
    card = json.loads((made.output / "dataset.json").read_text())
    assert card["trained_tokens"] == sum(sum(mask) for _, mask in expected)
    assert shardkit.verify(made.output).ok


VARIABLES = (
    "{{ date_string or 'no date' }}{{ strftime_now('%d %m %y') if asks is defined else '' }}"
    "{% for document in documents or [] %}{{ document.title }}{% endfor %}"
    + CHATML
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}no{% endif %}"
)


def test_variables_of_the_template_come_from_the_recipe_and_from_each_record(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    of_records: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": None},
        {"chat_template_kwargs": {"date_string": "two <|im_end|>"}},
        {"chat_template_kwargs": {"documents": [{"title": "first"}, {"title": "second"}]}},
        {"chat_template_kwargs": {"asks": True}},
    ]
    talk = TALKS[2]
    lines = [json.dumps({"messages": talk} | one) + "\n" for one in of_records]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    given = {"date_string": "one", "strftime_now": "2026-01-31"}
    recipe = recipe_of(folder, tmp_path, VARIABLES)
    recipe["tokenizer"]["chat_template_kwargs"] = given
    decode = decoder_of(folder).decode

    def texts(recipe: dict[str, Any], place: str) -> list[str]:
        made = build(recipe | {"dedup": None, "output": str(tmp_path / place)}, workers=1, progress=False)
        return sorted(decode(list(ids), skip_special_tokens=False) for ids, _ in documents(made.open()))

    load: Any = PreTrainedTokenizerFast
    peer = load(tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS)
    expected = {
        peer.apply_chat_template(
            talk,
            chat_template=VARIABLES.replace("strftime_now('%d %m %y')", "'31 01 26'"),
            tokenize=False,
            **{**given, **(one.get("chat_template_kwargs") or {})},
        )
        + EOS
        for one in of_records
    }
    assert len(expected) == 4
    assert texts(recipe, "lines") == sorted(expected)
    (tmp_path / "a.jsonl").unlink()
    own = [one.get("chat_template_kwargs") for one in of_records]
    table = pa.table({"messages": [talk] * len(own), "chat_template_kwargs": own})
    pq.write_table(table, tmp_path / "a.parquet")
    recipe["inputs"] = [{"path": str(tmp_path / "a.parquet"), "messages": "messages"}]
    assert texts(recipe, "table") == sorted(expected)
    recipe["tokenizer"] = recipe["tokenizer"] | {"chat_template_kwargs": given | {"date_string": "spaces"}}
    changed = {text.replace("one", "spaces", 1) if text.startswith("one") else text for text in expected}
    assert texts(recipe, "changed") == sorted(changed)


def test_variables_are_part_of_what_names_the_work_that_may_be_kept() -> None:
    given: list[dict[str, Any]] = [{}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": None}, {"b": 1}, {"a": [1]}]
    assert len({ChatFormat(CHATML, (EOS,), {}, EOS, None, one).content for one in given}) == len(given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": []}, "messages cannot be set here: it comes from the conversation"),
        ({"tools": []}, "tools cannot be set here: it comes from the conversation"),
        ({"strftime_now": "today"}, "strftime_now is not a date such as 2026-01-31"),
        ({"x": float("nan")}, "should be a finite number"),
        ({"x": b"a"}, "should be a value of another type"),
    ],
)
def test_variables_that_are_no_json_or_the_conversations_own_are_refused(
    folder: Path, tmp_path: Path, given: dict[str, Any], problem: str
) -> None:
    recipe = recipe_of(folder, tmp_path, CHATML)
    recipe["tokenizer"]["chat_template_kwargs"] = given
    with pytest.raises(RecipeError, match=rf"tokenizer\.chat_template_kwargs.*: {problem}"):
        recipe_from_mapping(recipe, folder=tmp_path)


def test_a_date_of_yaml_is_the_text_that_was_written(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, tmp_path, CHATML)
    given = {"strftime_now": date(2026, 1, 31), "x": [{"y": date(2024, 7, 26)}]}
    recipe["tokenizer"]["chat_template_kwargs"] = given
    tokenizer = recipe_from_mapping(recipe, folder=tmp_path).tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template_kwargs == {"strftime_now": "2026-01-31", "x": [{"y": "2024-07-26"}]}


@pytest.mark.parametrize("given", [[1], "text", {"add_generation_prompt": True}, {"strftime_now": 3}])
def test_variables_of_a_record_that_are_none_cost_the_record(
    folder: Path, tmp_path: Path, given: Any, inline_builds: None
) -> None:
    lines = [{"messages": TALKS[2]}, {"messages": TALKS[2], "chat_template_kwargs": given}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BuildError, match=r"a\.jsonl: record 1 .*bad_messages: chat_template_kwargs"):
        build(recipe_of(folder, tmp_path, CHATML), workers=1, progress=False)
    made = build(recipe_of(folder, tmp_path, CHATML, max_bad_fraction=0.9), workers=1, progress=False)
    assert made.funnel.kept.documents == 1


def test_a_record_that_its_template_cannot_render_goes_to_the_quarantine(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    template = CHATML + (
        "{% for n in messages[0].count or [] %}{{ 1 / n }}{% endfor %}"
        "{% if messages[0].wide %}{{ 'a'|center(messages[0].wide) }}{% endif %}"
    )
    first = {"role": "user", "content": "one"}
    talks = [[first | more, TALKS[2][1]] for more in ({}, {"count": [0]}, {"wide": 10**9}, {"count": "x"})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    recipe = recipe_of(folder, tmp_path, template, max_bad_fraction=0.9)
    made = build(recipe, workers=1, progress=False)
    assert made.funnel.kept.documents == 1
    reasons = {name: count.documents for name, count in made.funnel.quarantined.items()}
    assert reasons == {"bad_messages": 2, "template_limit": 1}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json, in the same folder, cannot be read"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json, in the same folder, is not a JSON object"),
        ("tokenizer_config.json", b'{"bos_token": {"x": 1}}', "bos_token is not text"),
        ("tokenizer_config.json", b'{"eos_token": 5}', "eos_token is not text"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [1, {"name": "default"}]}',
            "there is no file .*, and no chat_template",
        ),
        ("chat_template.jinja", b"\xff", "cannot be read as UTF-8"),
        ("chat_template.jinja", b"{% for %}", "tokenizer.chat_template: line 1"),
        ("tokenizer.json", b'{"model": {}, "added_tokens": [{}]}', "entry 0 has no string"),
    ],
)
def test_damaged_files_of_a_chat_model_are_errors_that_name_them(
    folder: Path, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALKS[2]}) + "\n")
    recipe = recipe_of(folder, tmp_path, CHATML)
    recipe["tokenizer"] = {"path": str(tmp_path / "tokenizer.json"), "eos": EOS}
    with pytest.raises(RecipeError, match=problem):
        build(recipe, workers=1, progress=False)


def test_text_that_spells_a_special_token_stays_text(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALKS[0]}) + "\n")
    made = build(recipe_of(folder, tmp_path, CHATML), workers=1, progress=False)
    [(ids, _)] = documents(made.open())
    tokenizer = decoder_of(folder)
    end = tokenizer.token_to_id("<|im_end|>")
    assert sum(token == end for token in ids) == 2
    assert "It is a <|im_end|> test." in tokenizer.decode(list(ids), skip_special_tokens=False)


def test_tables_prompts_and_plain_documents_share_a_dataset_and_labels_follow_the_mask(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    pq.write_table(pa.table({"messages": TALKS[1:]}), tmp_path / "talks.parquet")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"p": "what is two", "c": " it is two"}) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "one and two and one"}) + "\n")
    inputs = [
        {"path": str(tmp_path / "talks.parquet"), "messages": "messages"},
        {"path": str(tmp_path / "pairs.jsonl"), "prompt": "p", "completion": "c"},
        {"path": str(tmp_path / "plain.jsonl")},
    ]
    made = build(recipe_of(folder, tmp_path, CHATML, inputs=inputs), workers=1, progress=False)
    found = documents(made.open())
    assert len(found) == 4
    decode = decoder_of(folder).decode
    chosen = [[i for i, m in zip(ids, mask, strict=True) if m] for ids, mask in found]
    trained = {decode(ids, skip_special_tokens=False) for ids in chosen}
    assert trained == {
        f" it is two{EOS}",
        f"one and two and one{EOS}",
        "first answer<|im_end|>second\n\nanswer <|im_end|>",
        "ok<|im_end|>",
    }
    with StreamingLoader(made.output, batch_size=1, labels="shifted", shuffle="none", tail="pad") as loader:
        for row, batch in zip(made.open(), loader, strict=False):
            tokens, mask = (np.asarray(row[name]).astype(np.int64) for name in ("tokens", "loss_mask"))
            expected = np.where(mask == 1, tokens, -100)[1:]
            assert np.array_equal(np.asarray(batch["labels"])[0], expected)


def test_truncated_conversations_keep_their_beginnings_and_all_masked_tokens_are_booked(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    pairs = [{"p": "one", "c": " two" * (number % 7 + 1) + f" {number}"} for number in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    changes = {"inputs": [{"path": str(tmp_path / "pairs.jsonl"), "prompt": "p", "completion": "c"}]}
    recipe = recipe_of(folder, tmp_path, CHATML, **changes)
    whole = build(recipe | {"output": str(tmp_path / "whole")}, workers=1, progress=False).open()
    pack = {"sequence_length": 12, "strategy": "best_fit_truncate"}
    made = build(recipe | {"pack": pack}, workers=1, progress=False).open()
    expected = sorted((ids[:12], mask[:12]) for ids, mask in documents(whole))
    found = []
    for row in range(len(made)):
        tokens, mask = np.asarray(made[row]["tokens"]), np.asarray(made[row]["loss_mask"])
        for document in made.documents(row):
            start, stop = document.start, document.end
            found.append((tuple(tokens[start:stop].tolist()), tuple(mask[start:stop].tolist())))
    assert sorted(found) == [(tuple(ids), tuple(mask)) for ids, mask in expected]
    card = made.card
    assert card is not None
    assert card.data["trained_tokens"] == sum(sum(mask) for _, mask in found)
    assert card.packing["cropped"] > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dedup": {"lines": True}}, "dedup.lines would remove lines of conversations"),
        ({"filters": ["c4_quality"]}, "c4_quality edits texts"),
        (
            {"filters": [{"decontamination": {"evaluations": [{"path": "e"}], "cut": {}}}]},
            "decontamination edits texts",
        ),
        ({"inputs": [{"path": "a.jsonl", "prompt": "p"}]}, "name both"),
    ],
)
def test_recipes_that_would_break_a_mask_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str, inline_builds: None
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALKS[0]}) + "\n")
    with pytest.raises(RecipeError, match=problem):
        build(recipe_of(folder, tmp_path, CHATML, **changes), workers=1, progress=False)


def test_conversations_with_a_question_of_an_evaluation_set_go_and_the_others_keep_their_masks(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    """A filter that only judges may see conversations, unlike one that edits them."""
    question = "Which of the two towers that stand at the gate of the old town is the taller one?"
    items = [{"question": question, "answer": "the northern tower"}]
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "e.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    asked = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {tower}."}]
        for tower in ("the northern tower", "the other one")
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in [*TALKS, *asked])
    )
    evaluations = [{"path": str(tmp_path / "eval" / "e.jsonl")}]
    filters = [{"decontamination": {"evaluations": evaluations, "questions": {}}}]
    result = build(recipe_of(folder, tmp_path, CHATML, filters=filters), workers=1, progress=False)
    assert result.funnel.dropped["decontamination/question"].documents == 1
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in [*TALKS, asked[1]])
    )
    plain = recipe_of(folder, tmp_path, CHATML, output=str(tmp_path / "plain"))
    assert documents(result.open()) == documents(build(plain, workers=1, progress=False).open())


def test_a_record_that_is_refused_is_named(folder: Path, tmp_path: Path, inline_builds: None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user"}]}) + "\n")
    with pytest.raises(
        BuildError, match=r"a.jsonl: record 0 .*bad_messages: the chat template refuses the conversation"
    ):
        build(recipe_of(folder, tmp_path, CHATML), workers=1, progress=False)
    nothing = [{"role": "user", "content": "only a question"}]
    lines = [json.dumps({"messages": talk}) + "\n" for talk in (nothing, TALKS[1])]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    made = build(recipe_of(folder, tmp_path, CHATML), workers=1, progress=False)
    assert made.funnel.dropped["chat/nothing_to_train"].documents == 1
