"""`shardkit train-classifier`: labelled texts to a fastText model for the `classifier` filter."""

from __future__ import annotations

import argparse

from shardkit.cli.common import count, print_json, stdout_console
from shardkit.units import format_bytes

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "train-classifier",
        help="a fastText model from labelled texts, for the classifier filter",
        description="Train a fastText classifier on records of a JSONL file, and tell its precision and "
        "recall on a part of them that it has not seen. The same records and options give the same bytes. "
        "The model is in fastText's own format.",
        allow_abbrev=False,
    )
    parser.add_argument("labelled", metavar="LABELLED.jsonl", help="one JSON object a line")
    parser.add_argument("--output", required=True, metavar="MODEL.bin", help="the model file to write")
    parser.add_argument("--text", default="text", help="field of the text (default: text)")
    parser.add_argument("--label", default="label", help="field of the label (default: label)")
    # As in shardkit.writers.train_classifier, which would make --help slow.
    parser.add_argument("--epochs", type=count, default=5, metavar="N", help="passes (default: 5)")
    parser.add_argument(
        "--learning-rate", type=_positive, default=0.5, metavar="X", help="at the start (default: 0.5)"
    )
    parser.add_argument(
        "--dimensions", type=count, default=64, metavar="N", help="numbers in a vector (default: 64)"
    )
    parser.add_argument(
        "--word-ngrams", type=count, default=2, metavar="N", help="longest n-grams of words (default: 2)"
    )
    parser.add_argument(
        "--buckets",
        type=count,
        default=200_000,
        metavar="N",
        help="rows that n-grams share (default: 200000)",
    )
    parser.add_argument(
        "--min-count", type=count, default=1, metavar="N", help="fewest uses of a word (default: 1)"
    )
    parser.add_argument("--seed", type=count, default=17, metavar="N", help="of all chance (default: 17)")
    parser.add_argument(
        "--held-out",
        type=_part,
        default=0.1,
        metavar="X",
        help="part of records to measure by (default: 0.1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: a table)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train and print how good the model is."""
    from shardkit.writers.train_classifier import TrainingSettings, train_classifier

    names = TrainingSettings.__dataclass_fields__
    result = train_classifier(
        arguments.labelled,
        arguments.output,
        text=arguments.text,
        label=arguments.label,
        settings=TrainingSettings(**{name: getattr(arguments, name) for name in names}),
    )
    if arguments.json:
        print_json(result.to_dict())
        return 0
    from rich.table import Table

    table = Table("label", "documents", "held out", "precision", "recall", box=None, pad_edge=False)
    for one in result.labels:
        rates = [f"{rate:.3f}" if rate is not None else "-" for rate in (one.precision, one.recall)]
        table.add_row(one.label, f"{one.documents:,}", f"{one.held_out:,}", *rates)
    console = stdout_console()
    console.print(table)
    console.print(f"{result.path}: {format_bytes(result.bytes)}, from {result.documents:,} documents")
    return 0


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _part(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
