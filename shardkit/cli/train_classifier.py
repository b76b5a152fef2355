"""`shardkit train-classifier`: a fastText model for the `classifier` filter, from labeled texts."""

from __future__ import annotations

import argparse

from shardkit.cli.common import add_json_argument, argument, count, print_columns, print_json, stdout_console
from shardkit.units import format_bytes

__all__ = ["add_parser", "run"]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "train-classifier",
        help="a fastText model from labeled texts, for the classifier filter",
        description="Train a fastText classifier on records of a JSONL file, and measure its precision and "
        "recall on held-out records. The same records and options give the same bytes. The model is in "
        "fastText's own format.",
        allow_abbrev=False,
    )
    parser.add_argument("labelled", metavar="LABELLED.jsonl", help="file with one JSON object per line")
    parser.add_argument("--output", required=True, metavar="MODEL.bin", help="the model file to write")
    parser.add_argument("--text", default="text", help="field that holds the text (default: text)")
    parser.add_argument("--label", default="label", help="field that holds the label (default: label)")
    # As in shardkit.writers.train_classifier, which would make --help slow.
    parser.add_argument(
        "--epochs", type=count, default=5, metavar="N", help="passes over the records (default: 5)"
    )
    parser.add_argument(
        "--learning-rate",
        type=argument(_positive),
        default=0.5,
        metavar="X",
        help="initial learning rate (default: 0.5)",
    )
    parser.add_argument(
        "--dimensions", type=count, default=64, metavar="N", help="size of a vector (default: 64)"
    )
    parser.add_argument(
        "--word-ngrams",
        type=count,
        default=2,
        metavar="N",
        help="length of the longest word n-grams (default: 2)",
    )
    parser.add_argument(
        "--buckets",
        type=count,
        default=200_000,
        metavar="N",
        help="number of hash buckets for n-grams (default: 200000)",
    )
    parser.add_argument(
        "--min-count", type=count, default=1, metavar="N", help="minimum count of a word (default: 1)"
    )
    parser.add_argument("--seed", type=count, default=17, metavar="N", help="random seed (default: 17)")
    parser.add_argument(
        "--held-out",
        type=argument(_part),
        default=0.1,
        metavar="X",
        help="share of records to hold out for measuring (default: 0.1)",
    )
    add_json_argument(parser)
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
    rows = [
        (one.label, f"{one.documents:,}", f"{one.held_out:,}",
         *(f"{rate:.3f}" if rate is not None else "-" for rate in (one.precision, one.recall)))
        for one in result.labels
    ]  # fmt: skip
    print_columns("", ("label", "documents", "held out", "precision", "recall"), rows)
    stdout_console().print(
        f"{result.path}: {format_bytes(result.bytes)}, from {result.documents:,} documents"
    )
    return 0


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < 1000:
        raise ValueError(f"{text!r} is not a number above 0")
    return value


def _part(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise ValueError(f"{text!r} is not a number from 0 to below 1")
    return value
