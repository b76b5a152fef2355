"""The options of stores: the same for every verb that takes URLs, and the defaults of `StorageOptions`."""

from __future__ import annotations

import argparse

import pytest

from shardkit.cli.common import add_storage_arguments, storage_options
from shardkit.cli.main import make_parser
from shardkit.storage.store import StorageOptions


def options_of(*words: str) -> StorageOptions:
    parser = argparse.ArgumentParser()
    add_storage_arguments(parser)
    return storage_options(parser.parse_args(words))


def test_what_is_left_out_is_left_to_the_environment() -> None:
    assert options_of() == StorageOptions()


def test_every_option_arrives() -> None:
    words = "--endpoint-url http://x:9 --region r --profile p --virtual-style --checksums when_supported"
    assert options_of(*words.split()) == StorageOptions(
        endpoint_url="http://x:9", region="r", profile="p", path_style=False, checksums="when_supported"
    )
    assert options_of("--path-style").path_style is True


@pytest.mark.parametrize("words", ["--path-style --virtual-style", "--checksums always", "--region"])
def test_nonsense_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(*words.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["build r.yaml", "info s3://b/x", "verify s3://b/x", "upload out s3://b/x", "download s3://b/x out"],
)
def test_every_verb_that_takes_urls_has_them(command: str) -> None:
    arguments = make_parser().parse_args([*command.split(), "--endpoint-url", "http://x:9"])
    assert storage_options(arguments) == StorageOptions(endpoint_url="http://x:9")
