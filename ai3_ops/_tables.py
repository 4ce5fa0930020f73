"""Reports as text: tables of plain cells and sentences, in lines. rich, which draws them, is imported when one is shown."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), fold: bool = False
) -> Table:
    """Without lines between cells. Columns headed as in `right` are numbers, `fold` breaks long words of the others."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False)
    for head in heads:
        if head in right:
            made.add_column(head, justify="right", no_wrap=True)
        else:
            made.add_column(head, overflow="fold" if fold else "ellipsis")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def lines(*parts: Table | str, width: int = WIDTH) -> list[str]:
    """What a report consists of, below each other."""
    from rich.console import Console
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def shown_bytes(count: int | None) -> str:
    """In the largest unit of which there is one; nothing for 0 or None."""
    if not count:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
