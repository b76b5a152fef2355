"""The report of a dataset, a function of its card: one HTML page without scripts or external resources.

It has no times, no folder names and no number of workers. The times of a build are on a separate page
(`render_times`), because they belong to one run, not to the dataset.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.card import AmountFacts, Count, DatasetCard, FilterFacts, Histogram, InputFacts, LanguageCounts
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.order.token_mask import LONGEST_PERIOD
from shardkit.settings import TRAIN
from shardkit.units import format_bytes
from shardkit.writers.report.costs import better_place
from shardkit.writers.report.dedup import render_dedup
from shardkit.writers.report.html import (
    STYLE,
    bars,
    cell,
    counted,
    facts,
    more,
    name,
    number,
    percent,
    section,
    size,
    table,
    text,
    tiles,
)
from shardkit.writers.report.result import BuildResult

_MOST_LANGUAGES = 30
_LOSSES = 3  # number of reasons for dropping documents in the headline


def render_funnel(card: DatasetCard) -> str:
    """Render the section with the documents and the text that each step of the build removed and kept."""
    steps = card.funnel_steps()
    documents, whole = steps[0].documents, steps[0].bytes
    rows = []
    for step in steps:
        colour = step.kind if step.kind in ("read", "kept") else "read"
        rows.append(
            [
                cell(f"{step.kind}: {step.label}" if step.kind == "quarantined" else step.label),
                number(f"−{step.lost_documents:,}" if step.lost_documents else ""),
                number(step.documents),
                number(percent(step.documents, documents)),
                bars(documents, (colour, step.documents), (step.kind, step.lost_documents)),
                more(_lost(step.lost_bytes)),
                more(format_bytes(step.bytes)),
                more(percent(step.bytes, whole)),
                bars(whole, (colour, step.bytes), (step.kind, step.lost_bytes)),
            ]
        )
    head = ("step", ">lost", ">left", ">of read", "|documents", ">>lost", ">>left", ">>of read", "|text")
    key = (
        '<p class="note key">Bars: <span class="read"></span>what a step left <span class="dropped"></span>'
        'what it lost <span class="quarantined"></span>could not be read <span class="kept"></span>kept</p>'
    )
    note = (
        '<p class="note">Every record that was read is kept, dropped by a rule or quarantined as unreadable: '
        "that the numbers add up was checked. Steps that lose text and no document cut parts out of "
        "documents that stay. Text is in bytes of UTF-8. What each rule of a filter took is below.</p>"
    )
    return section("Funnel", table(head, rows, caption="Documents and text after each step"), key, note)


def _lost(lost: int) -> str:
    if not lost:
        return ""
    return f"−{format_bytes(lost)}" if lost > 0 else f"+{format_bytes(-lost)}"


def render_sources(card: DatasetCard) -> str:
    """Render the section with the documents and tokens of each input of the recipe."""
    inputs, tokens = card.inputs, _tokens(card)
    most = max((entry.tokens for entry in inputs), default=0)
    rows = []
    for entry in inputs:
        read, kept = entry.funnel.read.documents, entry.funnel.kept.documents
        once = entry.tokens - entry.repeated.tokens
        per_token = f"{entry.funnel.kept.bytes / once:.2f}" if once else ""
        rows.append(
            [
                cell(entry.source),
                number(entry.files),
                number(format_bytes(entry.bytes)),
                number(read),
                number(kept),
                number(percent(kept, read)),
                more(per_token),
                *counted(entry.tokens, tokens, most),
            ]
        )
    head = (
        *("source", ">files", ">stored", ">read", ">kept", ">of read", ">>bytes a token"),
        *(">tokens", ">of all", "|tokens"),
    )
    note = (
        '<p class="note">Bytes a token: English has 4 to 5 with most vocabularies. With far fewer, '
        "the tokenizer was made for other text, and the same text costs more tokens.</p>"
    )
    copies = [
        f"{entry.repeated.documents:,} of {text(entry.source)} ({entry.repeated.tokens:,} tokens)"
        for entry in inputs
        if entry.repeated.documents
    ]
    if copies:
        note += (
            '<p class="note">Copies of repeated documents, which count as tokens but not as documents: '
            f"{', '.join(copies)}.</p>"
        )
    return section("Sources", table(head, rows, caption="Documents and tokens by source"), note)


def _tokens(card: DatasetCard) -> int:
    """Return the number of tokens in the dataset; 0 for a dataset of text."""
    return card.tokens if card.has("tokens") else 0


def render_buckets(card: DatasetCard) -> str:
    """Render the section on quality classes: the edges of each score's bins, and the labels of bins."""
    buckets = card.buckets
    rows = [
        [cell(name), number(len(edges)), *(number(f"{edges[at]:.4g}" if edges else "") for at in places)]
        for name, edges in buckets.edges.items()
        for places in [(0, len(edges) // 2, -1)]
    ]
    given = "The recipe gives the edges."
    fitted = (
        f"Edges are percentiles of {buckets.sampled:,} of {buckets.documents:,} documents without duplicates."
    )
    ranges = sorted((buckets.labels or {}).items(), key=lambda item: -item[1])
    labels = ", ".join(f"{name} from bin {least:g}" for name, least in ranges) or "the bin itself"
    note = (
        f'<p class="note">{fitted if buckets.documents else given} The bin of a score is how many edges '
        f"it reaches; the {text(buckets.combine)} of a document's bins gives the field "
        f"<code>{text(buckets.field)}</code>: {text(labels)}.</p>"
    )
    head = ("score", ">edges", ">lowest", ">middle", ">highest")
    return section("Quality classes", table(head, rows, caption="Edges of the bins of each score"), note)


def render_amounts(card: DatasetCard) -> str:
    """Render the section on how much of each source was used."""
    rows = [
        [
            cell(_choice(one)),
            number(one.found.documents),
            number(one.taken.documents),
            number(one.left_out.documents),
        ]
        for one in card.amounts
    ]
    for one in card.amounts:
        most = sorted(one.values.items(), key=lambda item: -item[1][0])[:_MOST_LANGUAGES]
        rows += [
            [cell(f"{_choice(one)}: {value}"), number(found), number(taken), number(found - taken)]
            for value, (found, taken) in most
        ]
    note = (
        '<p class="note">Of the documents that earlier steps left, those with the lowest hashes were taken. '
        "The others are in <code>duplicates/</code>, with the reason amount or not_sampled.</p>"
    )
    head = ("source", ">left", ">taken", ">not taken")
    return section("Amounts", table(head, rows, caption="Documents by source"), note)


def _choice(facts: AmountFacts) -> str:
    return f"{facts.source} (sample {facts.sample})" if facts.sample else facts.source


def render_split(card: DatasetCard) -> str:
    """Render the section on parts such as validation, and on documents kept in train for their similarity."""
    split = card.split
    whole = sum(split.documents.values())
    train = card.funnel.kept.documents if split.part == TRAIN else None
    rows = [
        [
            cell(f"{name} (this dataset)" if name == split.part else name),
            number(split.documents[name]),
            number(split.proposed[name]),
            number(split.alike[name]),
        ]
        for name in split.documents
    ]
    if train is not None:
        rows.insert(0, [cell(f"{TRAIN} (this dataset)"), number(train), number(""), number("")])
    note = (
        f'<p class="note">{whole:,} documents are in parts of their own. A document was drawn by a hash; one '
        "that is like any other document of the corpus stayed in train: all pairs were compared. Alike are "
        f"two that share {split.similarity:g} of the n-grams of one of them."
    )
    if split.by is not None:
        note += (
            f" All documents with one value of <code>{text(split.by)}</code> are in one part, which was "
            "drawn by a hash of the value; if one of them is like a document with another value, all stayed "
            "in train."
        )
    note += "</p>"
    head = ("part", ">documents", ">drawn", ">alike, left in train")
    return section("Split", table(head, rows, caption="Documents by part"), note)


def render_languages(card: DatasetCard) -> str:
    """Render the section with documents and tokens by language; "" without a language filter."""
    languages, inputs = card.languages(), card.inputs
    if any(entry.languages is None for entry in inputs):
        return ""
    most = max((counts.tokens for counts in languages.values()), default=0)
    documents = sum(counts.documents for counts in languages.values())
    rows = [
        _language(label, counts, documents, _tokens(card), most, _sources_of(label, inputs))
        for label, counts in list(languages.items())[:_MOST_LANGUAGES]
    ]
    if rest := list(languages.values())[_MOST_LANGUAGES:]:
        others = sum(rest, LanguageCounts())
        rows.append(_language(f"{len(rest):,} others", others, documents, _tokens(card), most, ""))
    head = ("language", "mostly from", ">documents", ">of all", ">tokens", ">of all", "|tokens")
    note = (
        '<p class="note">The language that the language filter found most likely for each document that was '
        "kept, when it judged it; short and mixed texts, tables and code are often taken for something else."
        "</p>"
    )
    return section("Languages", table(head, rows, caption="Documents and tokens by language"), note)


def _language(
    label: str, counts: LanguageCounts, documents: int, tokens: int, most: int, sources: str
) -> list[str]:
    return [
        cell(label),
        cell(sources),
        number(counts.documents),
        number(percent(counts.documents, documents)),
        *counted(counts.tokens, tokens, most),
    ]


def _sources_of(label: str, inputs: Sequence[InputFacts]) -> str:
    """Return the two sources with the most tokens in a language, with their shares, as text."""
    none = LanguageCounts()
    tokens = [((entry.languages or {}).get(label, none).tokens, entry.source) for entry in inputs]
    shown = [(count, name) for count, name in sorted(tokens, key=lambda one: -one[0]) if count][:2]
    whole = sum(count for count, _ in tokens)
    return ", ".join(f"{name} {100 * count / whole:.0f}%" for count, name in shown)


def render_filters(filters: FilterFacts, read: Count) -> str:
    """Render the section on filters; `read` is the count of documents and bytes before them."""
    parts = []
    if filters.rules:
        parts += [_rules(filters, read), _note(filters)]
    if filters.languages:
        parts.append(_by_language(filters))
    if filters.cut:
        parts.append(_cut(filters, read.bytes))
    if filters.counts:
        parts.append(_counts(filters))
    if any(rule.excerpts for rule in filters.rules):
        parts += ["<h3>Some of what was dropped</h3>", _excerpts(filters)]
    return section("Filters", *parts)


def _rules(filters: FilterFacts, read: Count) -> str:
    most = max((rule.documents for rule in filters.rules), default=0)
    most_alone = max((rule.alone for rule in filters.rules), default=0)
    rows = [
        [
            name(rule.rule),
            *counted(rule.documents, read.documents, most, "dropped"),
            more(format_bytes(rule.bytes)),
            number(percent(rule.alone, filters.sampled)),
            bars(most_alone, ("dropped", rule.alone)),
        ]
        for rule in sorted(filters.rules, key=lambda rule: not rule.documents)
    ]
    used = sum(rule.documents > 0 for rule in filters.rules)
    fails = "|fails (regardless of other rules)"
    head = ("rule", ">documents", ">of read", "|dropped", ">>text", ">fails", fails)
    found = table(head, rows[:used], caption="What each rule dropped, in the order in which they were tried")
    if idle := rows[used:]:
        folded = table(head, idle, caption="Rules that dropped nothing")
        many = "1 rule" if len(idle) == 1 else f"{len(idle):,} rules"
        found += f"<details><summary>{many} dropped nothing</summary>{folded}</details>"
    return found


def _by_language(filters: FilterFacts) -> str:
    """Render a table of documents by language and reason, for filters whose settings differ by language."""
    shown = list(filters.languages.items())
    rows = [_language_rules(label, counts) for label, counts in shown[:_MOST_LANGUAGES]]
    if rest := shown[_MOST_LANGUAGES:]:
        counts: Counter[str] = Counter()
        for _, each in rest:
            counts.update(each)
        rows.append(_language_rules(f"{len(rest):,} others", counts))
    head = ("language", ">documents", ">dropped", ">of all", "mostly by")
    return table(head, rows, caption="What the language filter and those after it dropped, by language")


def _language_rules(label: str, counts: Mapping[str, int]) -> list[str]:
    documents = sum(counts.values())
    dropped = {rule: count for rule, count in counts.items() if rule}
    most = sorted(dropped.items(), key=lambda item: -item[1])[:3]
    lost = sum(dropped.values())
    return [
        cell(label),
        number(documents),
        number(lost),
        number(percent(lost, documents)),
        cell(", ".join(f"{rule} {count:,}" for rule, count in most)),
    ]


def _note(filters: FilterFacts) -> str:
    return (
        '<p class="note">Dropped: each document counts for the first rule that it fails. Fails: the share of '
        f"a sample of {filters.sampled:,} documents (one in {filters.one_in:,}, chosen by hash) that fails "
        "the rule, regardless of other rules.</p>"
    )


def _cut(filters: FilterFacts, whole: int) -> str:
    most = max((abs(one.bytes) for one in filters.cut), default=0)
    rows = [
        [
            name(one.edit),
            number(size(one.bytes)),
            number(percent(abs(one.bytes), whole)),
            bars(most, ("dropped", one.bytes)),
        ]
        for one in filters.cut
    ]
    return table(("edit", ">text", ">of read", "|"), rows, caption="Cut out of documents")


def _counts(filters: FilterFacts) -> str:
    rows = [[name(one.name), number(one.count)] for one in filters.counts]
    return table(("what", ">count"), rows, caption="Counted by editors")


def _excerpts(filters: FilterFacts) -> str:
    rows = []
    for rule in filters.rules:
        for place, shown in enumerate(rule.excerpts):
            found = f"<bdi>{text(shown.file)}</bdi>, record&nbsp;{shown.record:,}"
            excerpt = f'<td class="text" dir="auto">{text(shown.text)}</td>'
            rows.append([name(rule.rule if not place else ""), f'<td class="place">{found}</td>', excerpt])
    head = ("rule", "document", "its beginning, when it was dropped")
    return table(head, rows, caption="Up to three documents of each rule, drawn by hash")


def render_lengths(card: DatasetCard) -> str:
    """Render the section with numbers of documents, and of the tokens in them, by length of the document."""
    lengths = card.histograms["lengths"]
    bins = lengths.bins()
    most = max((one.count for one in bins), default=0)
    most_tokens = max((one.sum for one in bins), default=0)
    rows = [
        [
            number(one.label),
            *counted(one.count, lengths.count, most),
            *counted(one.sum, lengths.sum, most_tokens),
        ]
        for one in bins
    ]
    head = (">tokens in it", ">documents", ">of all", "|", ">tokens", ">of all", "|")
    caption = "Kept documents by their number of tokens, the eos included"
    mean = f"{lengths.sum / max(1, lengths.count):,.1f} tokens a document on average."
    return section("Document lengths", table(head, rows, caption=caption), f'<p class="note">{mean}</p>')


def render_packing(card: DatasetCard) -> str:
    """Render the section on packing: its counts, and rows by padding and by number of pieces."""
    packing, length = card.packing, card.sequence_length
    cells, pieces = card.samples * length, card.histograms["row_pieces"]
    told = {
        "Strategy": card.recipe["pack"]["strategy"],
        "Partitions": f"{packing['partitions']:,}, packed each by itself",
        "Padding": f"{card.padding:,} tokens, {percent(card.padding, cells)} of all",
        "Documents cut": f"{packing['cut_documents']:,} of {packing['documents']:,} "
        f"({percent(packing['cut_documents'], packing['documents'])}); {packing['needless_cuts']:,} of them "
        "would have fitted into one row",
        **_policies(card),
        **_trained(card),
        "Pieces": f"{pieces.sum:,}, {pieces.sum / max(1, pieces.count):.2f} in a row on average",
    }
    return section(
        "Packing",
        facts(told, caption=f"Rows of {length:,} tokens"),
        _rows(card.histograms["row_padding"], ">tokens of padding", "Rows by their tokens of padding"),
        _rows(pieces, ">pieces", "Rows by the documents, or parts of some, in them"),
    )


def _policies(card: DatasetCard) -> dict[str, str]:
    """Return counts, as text, of tokens removed by cropping or joining groups, and of repeated bos tokens."""
    packing, told = card.packing, {}
    if "cropped" in packing:
        cropped, all_tokens = packing["cropped"], card.tokens + packing["cropped"]
        told["Tokens left out"] = (
            f"{cropped:,} of {all_tokens:,} ({percent(cropped, all_tokens)}), the ends of "
            f"{packing['cropped_documents']:,} documents"
        )
    if "joined" in packing:
        told["Tokens of groups"] = (
            f"{packing['joined']:,} left out: headers and ends of text, where documents were joined"
        )
    if "repeated_bos" in packing:
        told["Rows within a document"] = f"{packing['repeated_bos']:,} begin with the bos again"
    return told


def _trained(card: DatasetCard) -> dict[str, str]:
    """Return the counts of tokens that the loss mask selects for training, as text; {} without a mask."""
    if not card.has("trained_tokens"):
        return {}
    trained = card.data["trained_tokens"]
    share = percent(trained, card.tokens)
    told = {"Trained on": f"{trained:,} tokens, {share}; the loss mask leaves out the rest"}
    if "repeated" in card.packing:
        most = card.recipe["pack"]["max_repetitions"]
        documents = card.packing["repeated_documents"]
        told["Repetitions masked"] = (
            f"{card.packing['repeated']:,} tokens of {documents:,} documents, where the same 1 to "
            f"{LONGEST_PERIOD} tokens follow each other more than {most:,} times"
        )
    return told


def _rows(histogram: Histogram, name: str, caption: str) -> str:
    bins = histogram.bins()
    most = max((one.count for one in bins), default=0)
    rows = [[number(one.label), *counted(one.count, histogram.count, most)] for one in bins]
    return table((name, ">rows", ">of all", "|"), rows, caption=caption)


def _headline(card: DatasetCard) -> str:
    """Render the headline: the share of documents that were kept, and the main reasons for losing others."""
    read, kept = card.funnel.read, card.funnel.kept
    lost = {**card.funnel.dropped, **card.funnel.quarantined}
    largest = sorted(lost.items(), key=lambda item: (-item[1].documents, item[0]))[:_LOSSES]
    losses = [
        f"{text(reason)} {percent(count.documents, read.documents)}"
        for reason, count in largest
        if count.documents
    ]
    named = f" Biggest losses: {', '.join(losses)}." if losses else ""
    sources = len({entry.source for entry in card.inputs})
    tokens = _tokens(card)
    title = f"{tokens:,} tokens from " if tokens else ""
    return (
        f"<h1>{title}{kept.documents:,} documents</h1>\n"
        f"<p>{percent(kept.documents, read.documents)} of {read.documents:,} documents are kept.{named}</p>"
        + tiles(
            (f"{tokens:,}", "tokens") if tokens else (f"{kept.documents:,}", "documents"),
            (percent(kept.documents, read.documents), "of documents kept"),
            (percent(kept.bytes, read.bytes), f"of text kept, {format_bytes(kept.bytes)}"),
            (f"{sources:,}", "source" if sources == 1 else "sources"),
        )
    )


_SECTION = re.compile(r'<section id="([^"]+)">\n<h2>([^<]+)</h2>')


def render_report(card: DatasetCard) -> bytes:
    """Render the report of a dataset, given its card, as one HTML page."""
    body = [
        render_funnel(card),
        render_sources(card),
        render_languages(card),
        render_filters(card.filters, card.funnel.read) if card.filters else "",
        render_dedup(card.dedup) if card.dedup else "",
        render_buckets(card) if card.has("buckets") else "",
        render_amounts(card) if card.has("amounts") else "",
        render_split(card) if card.has("split") else "",
        render_lengths(card) if card.has("histograms") else "",
        render_packing(card) if card.has("sequence_length") else "",
        section("Dataset", _facts(card)),
        _made_from(card),
        section("Recipe", f"<pre>{text_of_json(card.recipe)}</pre>"),
    ]
    links = "".join(
        f'<a href="#{anchor}">{title}</a>' for part in body for anchor, title in _SECTION.findall(part)
    )
    start = f"{_headline(card)}\n<nav>{links}</nav>"
    return html_page("Dataset report", [start, *body])


def html_page(title: str, body: list[str]) -> bytes:
    """Return a complete HTML page in the report's style, with `body` as its parts."""
    content = "\n".join(filter(None, body))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{content}\n</body>\n</html>\n"
    ).encode()


def text_of_json(content: Any) -> str:
    """Format plain data as indented JSON, escaped for HTML line by line."""
    lines = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).split("\n")
    return "\n".join(text(line) for line in lines)


def _facts(card: DatasetCard) -> str:
    documents = card.funnel.kept.documents
    told = {}
    if card.has("tokens"):
        told["Tokens"] = f"{card.tokens:,} in {documents:,} documents"
    told["Samples"] = f"{card.samples:,} documents"
    if card.format in TRAINER_FORMATS:
        told["Samples"] = (
            f"{documents:,} documents, in files of {card.dtype} ids for "
            f"{TRAINER_FORMATS[card.format].trainer}"
        )
    if card.has("sequence_length"):
        told["Samples"] = f"{card.samples:,} rows of {card.sequence_length:,} tokens ({card.dtype})"
    told |= {
        "Shards": f"{card.shards:,} ({card.format}), {format_bytes(card.stored_bytes)}",
        "Seed": f"{card.recipe['seed']}",
        "Fingerprint": card.fingerprint,
        "Made by": f"shardkit {card.shardkit_version}",
    }
    return facts(told, caption="Size and identity")


def _made_from(card: DatasetCard) -> str:
    """Render the section with the digests of everything that the dataset depends on, except the code."""
    tokenizer = card.tokenizer
    rows = [[cell("input"), cell(entry.source), _code(entry.digest)] for entry in card.inputs]
    if tokenizer.digest is not None:
        rows.append([cell("tokenizer"), cell(tokenizer.file or ""), _code(tokenizer.digest)])
    rows += [
        [cell("file of a filter"), cell(path), _code(digest)]
        for path, digest in sorted(card.filter_files.items())
    ]
    rows.append([cell("recipe"), cell("all keys but places"), _code(card.recipe_digest)])
    eos = ""
    if tokenizer.eos is not None:
        eos = f"<p>Documents end in {text(tokenizer.eos)} = {tokenizer.eos_id}.</p>"
    head = ("what", "name", "digest")
    return section("Made from", table(head, rows, caption="Digests of what was read"), eos)


def _code(digest: str) -> str:
    return f"<td><code>{text(digest)}</code></td>"


def _costs(result: BuildResult) -> str:
    rows = [
        [
            cell(cost.step),
            number(f"{cost.documents:,}"),
            number(f"{cost.dropped:,}"),
            number(percent(cost.dropped, cost.documents)),
            number("" if cost.seconds is None else f"{cost.seconds:,.2f}"),
            number(f"{1e6 * cost.seconds / cost.documents:,.0f}" if cost.seconds and cost.documents else ""),
        ]
        for cost in result.costs
    ]
    head = ("step", ">documents", ">removed", ">share", ">CPU s", ">us a document")
    advice = better_place(result.costs)
    notes = [f"{cost.step}: {cost.describe_spent()}" for cost in result.costs if cost.spent]
    note = "".join(f'<p class="note">{text(one)}.</p>' for one in [*([advice] if advice else []), *notes])
    found = table(head, rows, caption="What each step judged, removed and took")
    return section("Filters and duplicate removal", found, note)


def render_times(result: BuildResult) -> bytes:
    """Render the times and counts of each stage in a run as one HTML page in the style of `report.html`."""
    rows = [
        [
            cell(stage.stage),
            number(f"{stage.start:,.1f}"),
            number(f"{stage.seconds:,.1f}"),
            bars(result.total_seconds, ("gap", stage.start), ("other", stage.seconds)),
            number(f"{stage.cpu_seconds:,.1f}"),
            number(stage.tasks),
            number(stage.tasks_reused),
            number(f"{format_bytes(stage.bytes)}" if stage.bytes else ""),
            number(f"{format_bytes(stage.bytes_per_second)}/s" if stage.bytes else ""),
        ]
        for stage in result.stages
    ]
    told = {
        "Dataset": result.location,
        "Fingerprint": result.fingerprint,
        "In all": f"{result.total_seconds:,.1f} s, {format_bytes(result.text_bytes_per_second)}/s of text "
        f"read, {result.tokens_per_second:,.0f} tokens/s written",
        "Tasks": f"{result.tasks:,}, {result.tasks_reused:,} of them finished before this run",
    }
    head = ("stage", ">from s", ">for s", "|", ">CPU s", ">tasks", ">reused", ">text", ">text/s")
    note = (
        '<p class="note">Stages may run side by side. CPU is that of all workers together; CPU and text are '
        "of the tasks that this run ran, not of those that it reused.</p>"
    )
    found = table(head, rows, caption=f"Stages in {result.total_seconds:,.1f} s")
    parts = [facts(told, caption="This run"), section("Stages", found, note)]
    if result.costs:
        parts.append(_costs(result))
    return html_page("Build times", ["<h1>Build times</h1>", *parts])
