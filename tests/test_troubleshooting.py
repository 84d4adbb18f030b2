"""The troubleshooting page and the messages in the source are held together."""

from __future__ import annotations

import re

from sparsync_lab.docs.messages import GAP, OWN, WARNING, messages
from tests.page_blocks import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<said>[^`]+)` \| (?P<why>[^|]+) \| (?P<cure>[^|]+) \|$", re.MULTILINE)


def entries() -> dict[str, re.Pattern[str]]:
    """Return what matches the message of every row; a gap stands for anything."""
    said = [found["said"] for found in ROW.finditer(PAGE)]
    assert len(set(said)) == len(said)
    return {text: re.compile(".*".join(map(re.escape, text.split(GAP))), re.DOTALL) for text in said}


def test_every_error_and_warning_has_cause_and_cure() -> None:
    rows = entries()
    told = [message for message in messages() if message.kind in (*OWN, WARNING)]
    assert len(told) > 50
    missing = [message for message in told if not any(row.fullmatch(message.text) for row in rows.values())]
    assert missing == []


def test_every_row_is_a_message_of_the_source() -> None:
    stale = [text for text, row in entries().items() if not any(row.fullmatch(one.text) for one in messages())]
    assert stale == []


def test_rows_are_as_sharp_as_messages_allow() -> None:
    """A row must not be the answer to everything: messages that it matches say the same."""
    for text, row in entries().items():
        found = {message.text for message in messages() if row.fullmatch(message.text)}
        assert len(found) <= 2, (text, found)


def test_what_is_read_from_the_source_is_what_is_said() -> None:
    import pytest

    import sparsync

    with pytest.raises(ValueError, match="recipe") as refused:
        sparsync.config.resolve(recipe="defalt")
    texts = [message.text for message in messages() if message.kind == "ValueError"]
    assert any(re.fullmatch(".*".join(map(re.escape, text.split(GAP))), str(refused.value)) for text in texts)
