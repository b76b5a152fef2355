"""A Hub of the tests' own, with the environment of this process pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers.hub import TOKEN, HubServer, running_hub

__all__ = ["hub_environment", "hub_server"]


def hub_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The token of the tests' Hub, and nothing of this machine's own settings."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
        patch.delenv(name, raising=False)
    patch.setenv("HF_ENDPOINT", endpoint)
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setenv("HF_HUB_DISABLE_XET", "1")  # which the tests' Hub does not speak
    # The library reads the environment once, when it is imported.
    patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    patch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A Hub for as long as the block runs."""
    with running_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub_environment(patch, hub.endpoint)
        yield hub
