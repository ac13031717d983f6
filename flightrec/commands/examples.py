"""The examples at the end of each command's help. No state."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """Give the text for a command's ``epilog``: an example a line, which is not wrapped if it is below 78 characters.

    Typer takes single line breaks for spaces, and brackets for markup.
    """
    return "\n\n".join(["Examples:", *(f"  {line}".replace("[", "\\[") for line in lines)])
