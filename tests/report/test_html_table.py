"""Tables as HTML."""

from __future__ import annotations

from archsearch.report.html_table import LONGEST, table_html
from archsearch.report.tables import Table


def made(rows: int) -> Table:
    return Table("T <1>", ("a_b",), (("<x>",),) * rows, note="n & m", strong=frozenset({(0, 0)}))


def test_text_is_escaped_and_long_names_may_break() -> None:
    html = table_html(made(1))
    assert html.startswith("<h2>T &lt;1&gt;</h2>")
    assert '<td class="strong">&lt;x&gt;</td>' in html
    assert "<th>a_<wbr>b</th>" in html
    assert "n &amp; m" in html


def test_long_tables_are_folded_and_empty_ones_left_out() -> None:
    assert "<details>" not in table_html(made(LONGEST))
    assert table_html(made(LONGEST + 1)).startswith("<details><summary>T")
    assert table_html(made(0)) == ""
