"""Settings of one input in a recipe: the place of its records, the fields to read, and how to process it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PrivateAttr, model_validator

from shardkit.encodings import GUESS, encoding_of
from shardkit.errors import RecipeError
from shardkit.settings import FieldName, Listed, Ratio, Shorthand, Source, StrictModel, is_url
from shardkit.tokens.chat import misused_variables
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.filters.user_code import UserCode

if TYPE_CHECKING:
    from shardkit.storage.store import StorageOptions

Token = Annotated[str, Field(min_length=1)]
DOCUMENTS = "documents"  # path of the input for documents that are given in Python
_FORMAT_KEYS = ("format", "encoding", "delimiter", "quote", "columns", "lines", "salvage", "namespaces")
FILE_KEYS = (
    "exclude",
    "base",
    "path_fields",
    "reader",
    "list",
    "files",
    "storage",
    *_FORMAT_KEYS,
)  # keys that are about files only
READER = "reader"  # format of files that the user's function reads


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    if problem := misused_variables(given):
        raise ValueError(problem)
    return given


def _as_written(value: Any) -> Any:
    """Convert the dates that YAML parsed back to text, because JSON has no dates."""
    if isinstance(value, dict):
        return {key: _as_written(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_written(one) for one in value]
    return value.isoformat() if type(value) is date else value


TemplateVariables = Annotated[
    dict[str, JsonValue], BeforeValidator(_as_written), AfterValidator(_template_variables)
]
"""Variables of a chat template, as JSON values."""


class FimConfig(StrictModel):
    """Settings of fill-in-the-middle: the share of documents that are rearranged, and its special tokens."""

    rate: Ratio = Field(default=0.5, description="Share of the documents.")
    spm_rate: Ratio = Field(
        default=0.5,
        description="Share of these documents written suffix first (SPM); the others are prefix first (PSM).",
    )
    prefix: Token = Field(default="<fim_prefix>", description="Special token before the prefix.")
    middle: Token = Field(default="<fim_middle>", description="Special token before the middle.")
    suffix: Token = Field(default="<fim_suffix>", description="Special token before the suffix.")

    @property
    def tokens(self) -> tuple[str, str, str]:
        """The special tokens as (prefix, middle, suffix)."""
        return self.prefix, self.middle, self.suffix


class GroupConfig(StrictModel):
    """Settings of grouping, which joins documents with the same value of a field, such as one repository."""

    by: FieldName = Field(
        description="Field of metadata whose value groups documents, such as the repository's name.",
        examples=["repo"],
    )
    order: FieldName | None = Field(
        default=None,
        description="Field of metadata by which documents of a group are sorted, such as the path; null: "
        "random, as for StarCoder2.",
    )
    begin: Token | None = Field(
        default=None,
        description="Special token that begins a group; the value of `by` follows it.",
        examples=["<repo_name>"],
    )
    separator: Token | None = Field(
        default=None, description="Special token before each document.", examples=["<file_sep>"]
    )
    title: FieldName | None = Field(
        default=None,
        description="Field of metadata that is written before each document, on a separate line.",
        examples=["path"],
    )
    header_rate: Ratio = Field(
        default=1.0, description="Share of the groups that get the value and titles; StarCoder2: 0.5."
    )

    @model_validator(mode="after")
    def _ends_headers(self) -> Self:
        if self.begin is not None and self.separator is None:
            raise ValueError("separator: is missing; it must follow the group's value that `begin` precedes")
        if self.begin is not None and self.begin == self.separator:
            raise ValueError("begin and separator are the same token; use two different ones")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The metadata fields that grouping reads: `by`, `order` and `title`, as far as they are set."""
        return tuple(name for name in (self.by, self.order, self.title) if name is not None)


def _path_fields(value: str) -> str:
    if value == "hive":
        return value
    try:
        names = re.compile(value).groupindex
    except re.error as error:
        raise ValueError(f"is not a valid regular expression: {error}") from None
    if not names:
        raise ValueError("needs a named group, such as (?P<lang>[a-z]{2}), or must be the word hive")
    return value


def _encoding(value: str) -> str:
    if value == GUESS:
        return value
    found = encoding_of(value)
    if found is None:
        raise ValueError("is not a label of the WHATWG Encoding Standard, such as windows-1252 or shift_jis")
    if found in ("replacement", "x-user-defined"):
        raise ValueError("has no decoder in the WHATWG Encoding Standard; convert the files to UTF-8")
    return found


class ResiliparseOptions(StrictModel):
    """Parts of a page that resiliparse keeps."""

    main_content: bool = Field(
        default=True, description="Leave out navigation and other boilerplate, as far as it is recognized."
    )
    comments: bool = Field(default=False, description="Keep comments of readers.")
    alt_texts: bool = Field(default=False, description="Keep the alternative texts of images.")
    links: bool = Field(default=False, description="Keep the targets of links.")
    list_bullets: bool = Field(default=True, description="Keep the bullets and numbers of lists.")
    form_fields: bool = Field(default=False, description="Keep the values of form fields.")
    preserve_formatting: bool = Field(
        default=True, description="Keep line breaks between blocks, and indents of lists."
    )


class TrafilaturaOptions(StrictModel):
    """Parts of a page that trafilatura keeps."""

    favor: Literal["precision", "recall"] | None = Field(
        default="precision",
        description="precision: keep too little text rather than too much; recall: too much rather than too "
        "little; null: neither.",
    )
    comments: bool = Field(default=False, description="Keep comments of readers.")
    tables: bool = Field(default=True, description="Keep the text of tables.")
    links: bool = Field(default=False, description="Keep the targets of links.")
    images: bool = Field(default=False, description="Keep the sources and alternative texts of images.")
    formatting: bool = Field(default=False, description="Keep bold and italics as Markdown.")


class ExtractConfig(StrictModel):
    """The library that extracts the main text of HTML pages, with its options. Exactly one must be given."""

    resiliparse: ResiliparseOptions | None = Field(default=None, description="Options of resiliparse.")
    trafilatura: TrafilaturaOptions | None = Field(default=None, description="Options of trafilatura.")

    @model_validator(mode="after")
    def _one_library(self) -> Self:
        if (self.resiliparse is None) == (self.trafilatura is None):
            raise ValueError("give exactly one library, such as {trafilatura: {favor: recall}}")
        return self


class InputStorage(StrictModel):
    """How to reach the store of one input; null: as the options of the build say."""

    anonymous: bool | None = Field(
        default=None, description="true: unsigned requests, without any credentials, for a public bucket."
    )
    region: Token | None = Field(default=None, description="Region of the bucket.")
    endpoint_url: Token | None = Field(
        default=None, description="URL of an S3-compatible server; https://s3.amazonaws.com is AWS itself."
    )
    profile: Token | None = Field(default=None, description="Profile of the AWS configuration files.")
    requester_pays: bool | None = Field(default=None, description="true: agree to pay for the requests.")

    @model_validator(mode="after")
    def _is_signed_by_one(self) -> Self:
        if self.anonymous and self.profile is not None:
            raise ValueError("anonymous requests have no profile: give either anonymous or profile")
        return self

    def over(self, options: StorageOptions | None) -> StorageOptions:
        """Return the options of the build with these in their place."""
        given = {name: value for name, value in self if value is not None}
        if self.anonymous:
            given["profile"] = None
        elif self.profile is not None:
            given["anonymous"] = False
        from shardkit.storage.store import StorageOptions

        return replace(options or StorageOptions(), **given)


class InputConfig(StrictModel):
    """The settings of one input, which is a source of documents."""

    not_content = frozenset({"storage"})
    omitted_at_default = frozenset(
        {
            *("exclude", "document_id", "path_fields", "messages", "prompt", "completion", "fim"),
            *("on_bad_text", "reader", "list", "files", "namespaces"),
        }
    )

    path: Source = Field(
        description="File, folder or glob (** crosses folders; {a,b} and {00..12} are lists), relative to "
        "the recipe's folder, or a URL of these. Names that begin with . or _ are skipped unless spelled out."
    )
    list: Annotated[bool, DecidesNoByte("files count by their names and contents")] = Field(
        default=False,
        description="true: `path` is a list of paths, one path or URL per line (plain or compressed), such "
        "as Common Crawl's warc.paths.gz; lines are relative to `base`, null: to the folder of the list.",
    )
    files: Annotated[
        Annotated[int, Field(ge=1)] | None, DecidesNoByte("files count by their names and contents")
    ] = Field(
        default=None,
        description="Read only so many of the files, chosen by a hash of their names: a larger number adds "
        "files to the same ones; null: all files.",
        examples=[100],
    )
    exclude: Listed[FieldName] = Field(
        default=(),
        description="Globs of files to leave out, in the form of `path`; one without a slash matches names "
        "of files or folders at any depth.",
        examples=["MANIFEST.json", ["*.md", "data/drafts/**"]],
    )
    base: Source | None = Field(
        default=None,
        description="Folder (or URL, of a remote input) that file names are relative to, so that documents "
        "keep their ids when the files move; null: the recipe's folder; remote file names are whole URLs.",
    )
    storage: Annotated[InputStorage | None, DecidesNoByte("how files are reached")] = Field(
        default=None,
        description="How to reach a store, where this input needs other options than the rest of the build, "
        "such as {anonymous: true} for a public bucket; null: as the rest.",
        examples=[{"anonymous": True, "region": "us-east-1"}],
    )
    text: FieldName = Field(
        default="text",
        description="Field or column with the text; a.b is field b inside a (in id, url and metadata too).",
    )
    id: FieldName | None = Field(
        default=None,
        description='Field with your own id; null: "id" if a record has it.',
    )
    document_id: FieldName | None = Field(
        default=None,
        description="Field with the document ids that a text output of shardkit wrote (32 hexadecimal "
        "digits), so that documents keep their places in the training order; null: new ids.",
    )
    url: FieldName | None = Field(
        default=None,
        description='Field with the URL; null: "url" if a record has it.',
    )
    messages: FieldName | None = Field(
        default=None,
        description="Field with a conversation (a list of messages with role and content, as in OpenAI's and "
        "TRL's formats), which the tokenizer's chat template renders; replaces `text`.",
    )
    tools: FieldName = Field(
        default="tools", description="Field with the tools of a conversation, if a record has it."
    )
    chat_template_kwargs: FieldName = Field(
        default="chat_template_kwargs",
        description="Field with a conversation's own variables of the chat template, if a record has it.",
    )
    prompt: FieldName | None = Field(
        default=None, description="Field with a prompt, which is not trained on; needs `completion`."
    )
    completion: FieldName | None = Field(
        default=None, description="Field with the text that follows the prompt, which is trained on."
    )
    train_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant", description="Messages of conversations that the loss mask selects for training."
    )
    fim: Annotated[FimConfig, Shorthand(switch=True, number="rate")] | None = Field(
        default=None, description="Fill-in-the-middle for code: moves the middle of documents to their end."
    )
    metadata: Listed[FieldName] = Field(
        default=(),
        description="Other fields to keep in the provenance table, as one JSON object.",
    )
    path_fields: Annotated[str, AfterValidator(_path_fields)] | None = Field(
        default=None,
        description="Metadata from file names: hive for folders such as lang=de, or a regular expression to "
        "search for in the name, whose named groups are the fields.",
        examples=["hive", "(?P<dump>CC-MAIN-[0-9]{4}-[0-9]{2})/(?P<lang>[a-z]{2})"],
    )
    source: FieldName | None = Field(
        default=None,
        description="Label of this input in reports and provenance; null: input-<number in the recipe>.",
    )
    format: (
        Literal[
            "jsonl",
            "json",
            "parquet",
            "arrow",
            "csv",
            "text",
            "html",
            "warc",
            "mds",
            "wds",
            "mediawiki",
            "stackexchange",
            "pdf",
            "epub",
            "tfrecord",
        ]
        | None
    ) = Field(
        default=None,
        description="null: from the name (before .gz .zst .bz2 .xz .lz4): .jsonl .parquet .arrow .feather "
        ".csv .tsv .txt .html .warc .wet .arc .mds .tar .pdf .epub .tfrecord .xml (mediawiki; Posts.xml: "
        "stackexchange) and a few more; a .json file is jsonl, or json if it begins with an array or with an "
        "object of several lines.",
    )
    reader: Annotated[UserCode, Shorthand(text="function")] | None = Field(
        default=None,
        description="Function that reads files of any format: read(file, name, **parameters) gets an open "
        "binary file and its name, and yields a dict per record, or an exception for a bad one.",
        examples=["my_readers:read", {"function": "read", "file": "my_readers.py"}],
    )
    extract: Literal["resiliparse", "trafilatura", "none"] | ExtractConfig | None = Field(
        default=None,
        description="Library that extracts the main text of HTML; null: resiliparse for WARC, HTML, "
        "EPUB and Stack Exchange, else none. With options: {trafilatura: {favor: recall}}.",
    )
    encoding: Annotated[str, AfterValidator(_encoding)] | None = Field(
        default=None,
        description="Encoding of text, CSV, JSON and pages, a label of the WHATWG Encoding Standard; null: "
        "UTF-8, and for pages the declared encoding. A byte order mark or HTTP header takes precedence. "
        "guess: pages that declare none and are not UTF-8 are guessed, often wrongly; null rejects them.",
        examples=["windows-1252", "gbk", "utf-16le", "guess"],
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = Field(
        default=None,
        description="CSV: character between fields; null: the one in a first line such as sep=; else a tab "
        "for names with .tsv, else a comma; if the header has the text column only with another of tab , ; | "
        "then that one.",
    )
    quote: Annotated[str, Field(min_length=1, max_length=1)] | Literal["auto"] | None = Field(
        default="auto",
        description="CSV: character around fields that contain delimiters, quotes (doubled) or line ends; "
        'null: quotes are text, and every line is a row; auto: null for .tsv, " for .csv.',
    )
    columns: Listed[FieldName] = Field(
        default=(), description="CSV: names of the columns; (): the first row has the names."
    )
    on_bad_text: Literal["quarantine", "replace"] = Field(
        default="quarantine",
        description="For invalid UTF-8, and lone surrogates in JSON: quarantine the record, or replace them "
        "by U+FFFD; replaced bytes are counted as text/replaced.",
    )
    lines: bool | Literal["paragraphs"] = Field(
        default=False,
        description="Text files: true: each line is a document; paragraphs: each run of lines between blank "
        "lines is a document; false: each file is a document.",
    )
    namespaces: Listed[int] = Field(
        default=(0,),
        description="MediaWiki: numbers of the namespaces whose pages are read; 0: articles, 1: their talk "
        "pages, 4: pages about the project.",
    )
    salvage: bool = Field(
        default=False,
        description="Compressed files: if a member is truncated or damaged, keep the whole records before "
        "the damage, although no checksum confirms them; the rest is counted as salvage/lost and reported, "
        "and does not stop the build. false: such a member is quarantined.",
    )

    _is_sample: bool = PrivateAttr(default=False)
    _sampled: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def is_sample(self) -> bool:
        """Whether this input reads a sample of another input's files."""
        return self._is_sample

    def as_sample(self, path: str, source: str, names: Mapping[str, str]) -> InputConfig:
        """Return a copy of this input that reads a sample of its files at `path`, with the label `source`.

        `names` has the names of the files of the input by the last parts of their paths in the sample.
        """
        whole: dict[str, Any] = {"exclude": (), "base": None, "list": False, "files": None, "storage": None}
        copy = self.model_copy(update={"path": path, "source": source, **whole})
        copy._is_sample, copy._sampled = True, names
        return copy

    def name_of(self, file: str) -> str:
        """Return the name of a file, which in a sample is that of the file of the input."""
        return self._sampled.get(file.rpartition("/")[2], file)

    def content(self) -> dict[str, Any]:
        """Return all settings that affect outputs. `tools` and `train_on` do so only with `messages`."""
        left_out = ("tools", "train_on") if self.messages is None else ()
        return {key: value for key, value in super().content().items() if key not in left_out}

    @property
    def is_masked(self) -> bool:
        """Whether documents have a loss mask, because they are conversations or prompts with completions."""
        return self.messages is not None or self.prompt is not None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion are fields of one record: name both")
        if self.messages is not None and self.prompt is not None:
            raise ValueError("set either messages, or prompt and completion, not both")
        return self

    @model_validator(mode="after")
    def _reads_files_one_way(self) -> Self:
        if self.reader is not None:
            for key in _FORMAT_KEYS:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"{key}: `reader` reads files of any format itself; leave out one of them"
                    )
        return self

    @model_validator(mode="after")
    def _can_take_rows_apart(self) -> Self:
        for key, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is not None and value in "\r\n":
                raise ValueError(f"{key}: cannot be a line end")
        if self.delimiter is not None and self.delimiter == self.quote:
            raise ValueError("delimiter and quote are the same character; use two different ones")
        return self

    @model_validator(mode="after")
    def _base_is_above_the_path(self) -> Self:
        if self.list:
            return self  # a list may be anywhere
        if self.base is not None and is_url(self.path) != is_url(self.base):
            raise ValueError("base must be a folder above the path, or a URL above it if the path is a URL")
        return self


def with_documents(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's data with one input for documents that are given in Python.

    Raises RecipeError if the recipe names files, or sets what only files have.
    """
    given = data.get("inputs")
    entries = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if len(entries) > 1:
        raise RecipeError(f"inputs: a build with documents=… has one input; the recipe has {len(entries)}")
    entry = entries[0] if entries else {}
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, Mapping):
        return dict(data)  # refused with the other problems of the recipe
    if "path" in entry:
        raise RecipeError(
            f"inputs[0].path: a build reads either files ({entry['path']}) or documents=…; leave out "
            "`path` (other keys of the input, such as `text`, apply to documents) or `documents`"
        )
    if of_files := [key for key in FILE_KEYS if key in entry]:
        raise RecipeError(f"inputs[0].{of_files[0]}: is about files; leave it out with documents=…")
    return {**data, "inputs": [{"path": DOCUMENTS, **entry}]}
