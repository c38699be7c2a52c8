"""`twofold validate`: predict every row of a table of measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.commands.options import FileOutput, Word
from twofold.commands.values import HtmlFile

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Validate"]

_MOST_SHOWN = 10
"""Numbers of rows in one line of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Predict every row of a table of measurements and report the errors.

    Args:
        table: CSV, TSV, Markdown, HTML, LaTeX or JSON file with the columns source, model, layers, hidden, heads,
            kv_heads, ffn, vocab, seq, global_batch, micro_batch, tp, pp, dp, vpp, cp, ep, schedule, sequence_parallel,
            recompute, zero_level, gpu_type, gpu_count, interconnect, precision, compile, metric, value and so on, in
            the usual spellings. Other common column names and one column per metric work too. Assumptions about a row
            are in --json; its interval spans all plausible readings. Rows that cannot be modelled are listed with the
            reason.
        stack: the software that ran all rows; by default determined from each row.
        machine: the machine of all rows; by default determined from each row.
        host: host file (`twofold calibrate --host`) of the host on which all rows ran.
        report: write scores, errors and the worst rows to this HTML file.
    """

    table: Word
    stack: str | None = None
    machine: str | None = None
    host: str | None = None
    report: HtmlFile | None = None
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Predict all rows and print the scores by source."""
        from interop.measurements.validation import Validation, validate
        from reports.validation import scores_table, validation_page

        try:
            with console.doing("predicting the rows"):
                result = validate(
                    self.table, stack=self.stack, machine=self.machine, host=self.host, on_progress=console.print
                )  # fmt: skip
        except TwofoldError as error:
            if not self.output.json:
                raise
            console.print(f"error: {error}")
            return {**Validation(sources=(), rows=(), skipped=()).to_json(), "error": str(error)}, False
        if self.report is not None:
            saved = validation_page(Path(self.table).name, result.to_json()).write(self.report)
            console.print(f"saved {saved}")
        skipped: dict[str, list[int]] = {}
        for each in result.skipped:
            where = f"{each['column']}: " if each["column"] and each["column"] not in each["reason"] else ""
            skipped.setdefault(where + each["reason"], []).append(each["row"])
        if not result.rows:
            most = sorted(skipped, key=lambda reason: -len(skipped[reason]))[:3]
            reasons = "; ".join(f"{reason} ({len(skipped[reason])})" for reason in most)
            if self.output.json:
                return result.to_json(), False
            raise TwofoldError(f"no row of {self.table!r} can be predicted: {reasons}")
        console.print(scores_table(result.sources).text())
        if large := [row["row"] for row in result.rows if not row["fits"]]:
            shown = ", ".join(map(str, large[:_MOST_SHOWN])) + (", ..." if len(large) > _MOST_SHOWN else "")
            rows_are = "row is" if len(large) == 1 else "rows are"
            console.print(
                f"{len(large)} {rows_are} predicted to need more memory than the device has, yet ran: {shown}"
            )
        if failed := result.out_of_memory:
            agree = sum(each["agrees"] for each in failed)
            runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
            console.print(f"{runs} out of memory, {agree} of them predicted to need more than the device has")
        for reason, rows in skipped.items():
            shown = ", ".join(map(str, rows[:_MOST_SHOWN])) + (", ..." if len(rows) > _MOST_SHOWN else "")
            console.print(f"skipped {'row' if len(rows) == 1 else f'{len(rows)} rows:'} {shown}: {reason}")
        return result.to_json(), True
