"""The list of commands in a group's help."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

WHOLE = 10_000  # characters; a sentence that is too long for its line is wrapped, not cut


class CommandList(TyperGroup):
    """Lists commands with their whole first sentence, in plain text: markup would take ``[fast]`` for a colour."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in self.sections().items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(WHOLE)) for name in names])

    def sections(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the commands under their headings."""
        return {"Commands": tuple(self.commands)}
