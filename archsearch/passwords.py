"""Passwords in the URLs of databases: nothing that is printed or written down of a run shows one. No torch."""

from __future__ import annotations

import re
from typing import Any

from .config import RunConfig

HIDDEN = "***"
_OF_USER = re.compile(r"(://[^\s:/@]*:)[^\s@]*(?=@)")
_OF_QUERY = re.compile(r"([?&](?:password|passwd|pwd|sslpassword)=)[^\s&'\"]*", re.IGNORECASE)


def hide_passwords(text: str) -> str:
    """The text with HIDDEN in the place of every password of an URL."""
    for pattern in (_OF_USER, _OF_QUERY):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def shown_config(config: RunConfig) -> dict[str, Any]:
    """A config as JSON data that may be written down."""
    data: dict[str, Any] = config.model_dump(mode="json", by_alias=True)
    if config.search.storage is not None:
        data["search"]["storage"] = hide_passwords(config.search.storage)
    return data
