"""`python -m benchmarks.verification STUDY... --report FILE` conducts the studies that are named, or all."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.verification.studies import STUDIES, Outcome, Study, conducted
from reports.charts import Scale, Series, series_chart
from reports.page import Page, Part, Section, Text
from reports.plan_tables import short_plan_table

__all__ = ["main"]


def _figures(study: Study, outcome: Outcome) -> dict[str, Any]:
    return {
        "steps": len(outcome.losses), "ranks": outcome.plan.num_ranks, "first_loss": outcome.losses[0],
        "loss": outcome.losses[-1], "loss_alone": outcome.alone[-1], "early_difference": outcome.early_difference,
        "test_loss": outcome.test_losses[0], "test_loss_alone": outcome.test_losses[1],
        "accuracy": outcome.accuracies and outcome.accuracies[0],
        "accuracy_alone": outcome.accuracies and outcome.accuracies[1],
        "wrong": outcome.wrong(study),
    }  # fmt: skip


def _section(name: str, study: Study, outcome: Outcome) -> Section:
    curves = {"one process of torch": outcome.alone, f"{outcome.plan.num_ranks} ranks": outcome.losses}
    series = [
        Series(name=each, curve=list(enumerate(losses, 1)), dashed=at > 0)
        for at, (each, losses) in enumerate(curves.items())
    ]
    said = f"Losses of the first steps differ by {outcome.early_difference:.1e} at most. "
    said += "Test loss {:.4f}, alone {:.4f}".format(*outcome.test_losses)
    if outcome.accuracies:
        said += "; accuracy {:.2%}, alone {:.2%}".format(*outcome.accuracies)
    wrong = outcome.wrong(study)
    parts: list[Part] = [
        Text(f"{said}.", "fail" if wrong else "pass"), *[Text(each, "fail") for each in wrong],
        series_chart(series, Scale(x="step", y="loss"), title="Loss", caption="Equal losses coincide."),
        short_plan_table(outcome.plan),
    ]  # fmt: skip
    return Section(id=name, title=study.title, parts=parts)


def main(arguments: list[str] | None = None) -> int:
    """Conduct studies; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verification", description=__doc__)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)}; all where none is named")
    parser.add_argument("--steps", type=int, help="of each, instead of its own number")
    parser.add_argument("--report", type=Path, help="HTML page of the loss curves")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the figures; those of other studies stay")
    options = parser.parse_args(arguments)
    if odd := [name for name in options.studies if name not in STUDIES]:
        parser.error(f"there is no study {odd[0]!r}")
    bad, sections = 0, []
    for name in options.studies or STUDIES:
        study = STUDIES[name]
        if name == "llama" and importlib.util.find_spec("transformers") is None:
            print(f"{name}: not conducted, transformers is not installed")
            continue
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="twofold-verification-") as folder:
            outcome = conducted(
                study, Path(folder), steps=options.steps, tell=lambda rank, line: print(f"  {line}", flush=True)
            )
        figures = _figures(study, outcome)
        bad += bool(figures["wrong"])
        print(f"{name}, {time.monotonic() - begin_s:.0f} s: {figures}", flush=True)
        if options.out is not None:
            keep(options.out, name, figures)
        sections.append(_section(name, study, outcome))
        if options.report is not None:
            title = "Training under searched plans, beside one process"
            Page(kind="verification", title=title, sections=sections).write(options.report)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
