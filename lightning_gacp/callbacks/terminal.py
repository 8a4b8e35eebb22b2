"""Print tables and lines on rank 0: with rich where it is installed, else as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

_RICH = RequirementCache("rich>=10.2.2")
_FILE_WIDTH = 200


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, columns padded to their widest cell."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    head = [line(columns), line(["-" * width for width in widths])] if any(columns) else []
    return "\n".join([title, *head, *map(line, rows)])


@rank_zero_only
def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str] = ()) -> None:
    """Print a table and some lines below it; on rank 0 only.

    Args:
        title: Above the table.
        columns: Its heads; empty ones for a table without heads.
        rows: Its cells, as many a row as there are columns. Without rows there is no table.
        lines: Below it, one sentence each.
    """
    if not _RICH:
        if rows:
            print(plain_table(title, columns, rows))
        for text in lines:
            print(text)
        return
    from rich import get_console
    from rich.markup import escape
    from rich.table import Table

    console = get_console()
    if rows:
        table = Table(title=title, title_justify="left", header_style="bold", show_header=any(columns))
        for name in columns:
            table.add_column(name, overflow="fold")  # names of modules have no spaces to break at
        for row in rows:
            table.add_row(*map(escape, row))
        width = console.width
        if not console.is_terminal:  # a file is as wide as the table needs it to be; rich would take 80 columns
            console.width = max(width, _FILE_WIDTH)
        console.print(table)
        console.width = width
    for text in lines:
        console.print(escape(text), highlight=False, soft_wrap=True)


def size_text(size: float) -> str:
    """Return a size in bytes as text, in B, KiB, MiB or GiB (powers of 1024)."""
    for unit, power, digits in (("GiB", 30, 2), ("MiB", 20, 2), ("KiB", 10, 1)):
        if abs(size) >= 1 << power:
            return f"{size / (1 << power):.{digits}f} {unit}"
    return f"{size:.0f} B"


def flops_text(count: float) -> str:
    """Return a number of operations as text."""
    for unit, power in (("PFLOP", 15), ("TFLOP", 12), ("GFLOP", 9)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count / 1e6:.1f} MFLOP"
