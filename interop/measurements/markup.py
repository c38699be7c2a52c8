"""Tables in HTML and LaTeX as plain cells. A cell that spans rows or columns is repeated in each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

__all__ = ["html_tables", "latex_tables"]

_MOST_SPANNED = 64
"""Rows or columns of one cell."""

_TABULAR = re.compile(r"\\begin\{tabular\w*\*?\}(?:\[[^\]]*\])?\{((?:[^{}]|\{[^{}]*\})*)\}(.*?)\\end\{tabular", re.S)
_CAPTION = re.compile(r"\\caption\{((?:[^{}]|\{[^{}]*\})*)\}")
_RULES = re.compile(r"(?<!\\)%.*|\\(top|mid|bottom|c?mid|h|c)(rule|line)(\([^)]*\))?(\{[^}]*\})?")
_ACROSS = re.compile(r"\s*\\multicolumn\{(\d+)\}\{(?:[^{}]|\{[^{}]*\})*\}")
_DOWN = re.compile(r"\s*\\multirow(?:\[\w\])?\{(-?\d+)\}(?:\{[^}]*\}|\*)")

_RAISED = dict(zip("12345", "\u00b9\u00b2\u00b3\u2074\u2075", strict=True)) | {
    mark: mark for mark in "\u2020\u2021\u00a7*"
}
"""Marks of footnotes inside <sup>, and the signs that are read as marks."""

_BELOW = 6
"""Number of pieces of text below the last table that are given to it; of later ones only footnotes are."""

_MARKS = {r"\\dagger": "\u2020", r"\\ddagger": "\u2021", r"\\ast": "*", r"\^\{?\*": "*"}
"""Commands of the marks of footnotes, and the marks."""

Table = tuple[list[str], list[list[str]]]
"""The lines above a table, the nearest first, and its rows."""


def html_tables(text: str) -> list[Table]:
    """The tables of a page.

    >>> html_tables("<h2>Runs</h2><table><tr><th colspan=2>Batch<th>s</tr><tr><td>8<td>1<td>2</tr></table>")
    [(['Runs'], [['Batch', 'Batch', 's'], ['8', '1', '2']])]
    """
    parser = _Tables()
    parser.feed(text)
    parser.end()
    return [(titles, rows) for titles, rows in parser.tables]


def latex_tables(text: str) -> Iterator[Table]:
    r"""The tabulars of a text; the captions are above each of them.

    >>> list(latex_tables(r"\begin{tabular}{ll}\multicolumn{2}{c}{Batch} \\ 8 & 1 \\ \end{tabular}"))
    [([], [['Batch', 'Batch'], ['8', '1'], ['']])]
    """
    captions = [_plain(caption) for caption in _CAPTION.findall(text)]
    captions += [_plain(line) for line in text.splitlines() if re.match(r"\s*(?:\\\w+ +)*\$?\^?\{?\\d?dagger", line)]
    for columns, body in _TABULAR.findall(text):
        spreads = _columns_of_spreads(columns)
        rows: list[list[str]] = []
        below: dict[int, tuple[int, str]] = {}
        for line in re.split(r"\\\\(?:\[[^\]]*\])?", _RULES.sub("", body)):
            row: list[str] = []
            for cell in re.split(r"(?<!\\)&", line):
                across = _ACROSS.match(cell)
                own = cell[across.end() :] if across else cell
                down = _DOWN.match(own.lstrip("{ "))
                words = _plain(own.lstrip("{ ")[down.end() :] if down else own)
                for _ in range(min(int(across.group(1)) if across else 1, _MOST_SPANNED)):
                    left, spanned = below.pop(len(row), (0, ""))
                    if left and not words:
                        below[len(row)] = (left - 1, spanned)
                    elif down:
                        below[len(row)] = (min(int(down.group(1).lstrip("-")), _MOST_SPANNED) - 1, words)
                    row.append(words or (spanned if left else ""))
            for place in spreads:
                if 0 < place < len(row):
                    spread = row.pop(place)
                    row[place - 1] += f" \u00b1 {spread}" if spread and spread != row[place - 1] else ""
            rows.append(row)
        yield list(captions), rows


def _columns_of_spreads(columns: str) -> list[int]:
    r"""The columns behind a plus-minus that stands between two columns, the last first.

    >>> _columns_of_spreads(r"l r@{$\,\pm\,$}l c")
    [2]
    """
    repeated = re.sub(r"\*\{(\d+)\}\{([^{}]*)\}", lambda found: found[2] * min(int(found[1]), _MOST_SPANNED), columns)
    found, place = [], 0
    for kind in re.findall(r"[@!]\{[^{}]*\}|[pmb]\{[^{}]*\}|[a-zA-Z]", repeated):
        if kind[0] in "@!":
            found += [place] if r"\pm" in kind else []
        else:
            place += 1
    return found[::-1]


def _plain(cell: str) -> str:
    for command, mark in _MARKS.items():
        cell = re.sub(rf"\$?\^?\{{?{command}(?![a-z])\}}?\$?", mark, cell)
    cell = re.sub(r"\$?\^\{?[a-z]\}?\$?", "", cell)
    cell = re.sub(r"\\[,;: ]", " ", cell.replace(r"\!", ""))
    cell = re.sub(r"\\times|\\cdot", "x", re.sub(r"\\pm", "\u00b1", cell))
    cell = re.sub(r"\\(?:textbf|textit|underline|mathbf|text|emph|texttt|small|footnotesize)\b", "", cell)
    return re.sub(r"[{}$]|\\(?=[%&_#])|~", "", cell).strip()


class _Tables(HTMLParser):
    """The cells of all tables of a page, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self._said: list[str] = []
        self._rows: list[list[str]] | None = None
        self._cell: list[str] | None = None
        self._caption: list[str] | None = None
        self._in_mark = False
        self._note = ""
        self._span = (1, 1)
        self._below: dict[int, tuple[int, str]] = {}

    def end(self) -> None:
        """Give the footnotes below the last table to it."""
        if self.tables and self._rows is None:
            notes = (line for line in self._said[_BELOW:] if line[:1] in _RAISED.values() or line.startswith("[^"))
            self.tables[-1][0].extend([*self._said[:_BELOW], *notes])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._rows, self._below = [], {}
            self.tables.append((self._said[::-1], self._rows))
            self._said = []
        elif tag == "caption":
            self._caption = []
        elif tag == "sup":
            self._in_mark = True
        elif tag == "br":
            self.handle_data(" ")
        elif tag == "tr" and self._rows is not None:
            self._end_cell()
            self._fill_spanned(to_end=True)
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._end_cell()
            self._cell = []
            self._span = (_span(dict(attrs).get("rowspan")), _span(dict(attrs).get("colspan")))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._end_cell()
        elif tag == "sup":
            self._in_mark = False
        elif tag == "caption" and self._caption is not None and self.tables:
            self.tables[-1][0].insert(0, " ".join("".join(self._caption).split()))
            self._caption = None
        elif tag == "table":
            self._end_cell()
            self._fill_spanned(to_end=True)
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._in_mark:  # of a footnote
            mark = data.strip()
            data = _RAISED.get(mark) or (f"[^{mark}]" if re.fullmatch("[a-h]", mark) else "")
            if self._cell is None and self._caption is None:
                self._note = data
                return
        if self._cell is not None:
            self._cell.append(data)
        elif self._caption is not None:
            self._caption.append(data)
        elif self._rows is None and data.strip():
            self._said.append(f"{self._note} {data.strip()}".strip())
            self._note = ""

    def _end_cell(self) -> None:
        if self._cell is None or not self._rows:
            return
        words = " ".join("".join(self._cell).split())
        self._cell = None
        down, across = self._span
        for _ in range(across):
            self._fill_spanned()
            if down > 1:
                self._below[len(self._rows[-1])] = (down - 1, words)
            self._rows[-1].append(words)

    def _fill_spanned(self, *, to_end: bool = False) -> None:
        """Append the cells of earlier rows that reach into this one, before the next cell or up to the row's end."""
        row = self._rows[-1] if self._rows else []
        while len(row) in self._below or (to_end and any(place > len(row) for place in self._below) and row):
            left, words = self._below.pop(len(row), (0, ""))
            if left > 1:
                self._below[len(row)] = (left - 1, words)
            row.append(words)


def _span(text: str | None) -> int:
    return max(1, min(int(text), _MOST_SPANNED)) if text is not None and text.strip().isdigit() else 1
