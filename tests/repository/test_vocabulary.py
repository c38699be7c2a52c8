"""One vocabulary: words that code, messages, help texts and pages do not use, and what they say instead."""

import re

from tests import ROOT

FOLDERS = (
    "plans", "costmodels", "simulator", "search", "executor", "interop", "reports", "twofold", "benchmarks", "docs",
    "examples",
)  # fmt: skip
SUFFIXES = {".py", ".md", ".html", ".js", ".toml"}
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")

# Names that one thing had before it had its own, and the name it has now.
NAMES = {
    r"\bFooting\b|\bfooting\b": "PeakMemory, peak memory",
    r"\bPlanSet\b": "SearchResult",
    r"\bhanded_on\b|\bhand_on_s\b|\bHanded\b": "TensorEdge, output_layout",
    r"\bStretch\b": "ClockMap",
    r"\bSite\b|\bpatience_s\b": "OpContext, timeout_s",
    r"\bParameterHome\b": "ParameterPlacement",
    r"\btold_by_rank_0\b": "broadcast_from_rank_0",
    r"\bHandOver\b|\bparcels?\b": "SelfTransfer, messages",
    r"\bis_fleeting\b|\breduces_each\b": "gathered_per_use, reduced_per_micro_batch",
    r"\bwanted_jobs\b|\bgo_on\b|\bBench\b": "requested_points, resume, OperandPool",
    r"\bown_rows\b|\bkept_block\b|\btier_spot\b": "a noun that says what it is",
}

# Turns that read as translated, and plain ones.
TURNS = {
    r"\bcarried out\b|\bis not carried\b": "is not supported, runs",
    r"\bwhole or not at all\b": "atomically",
    r"\bbrings? home\b": "result",
    r"\bhas no rule for\b": "unknown operation",
    r"\bno time to (?:measure|run)\b": "must be positive",
    r"\brest the pointer\b": "hover over",
    r"(?<!, )\bso many\b(?! that)": "the number, N",
    r"\banew\b": "again",
    r"\bhands? (?:it |them |none )?on\b": "pass",
    r"\b(?:is|are) told\b(?! to\b)": "is reported, knows, is called with",
    r"\bfor want of\b": "for lack of",
    r"\b(?:is|are) of no (?:account|matter|avail)\b": "does not matter",
    r"\b(?:thereof|thereby|therein|hereby|wherein|whereof|whilst|upon)\b": "of it, by this, in which, while, on",
    r"\bcome back as they went\b|\bas they went\b": "unchanged",
    r"\bbound to be\b|\bin so far\b|\binasmuch\b": "must be, as far as, since",
    r"\bgive (?:it )?away\b|\bby and by\b": "return, gradually",
    r"\bis none; use\b": "there is no ...; use",
    r"; (?:it|they) (?:is|are) (?:an?|one|at|either|from|true)\b": "X must be Y, not Z",
    r"\bin the place of\b": "instead of",
    r"\b(?:make|makes|made|making) again\b": "recompute",
    r"\bgives? back\b|\bgiven back\b": "return",
    r"\bg(?:oes|o|one|oing) on (?:from|with)\b": "resume, continue",
    r"\blooks? for no\b|\bknows? nothing of\b": "skip, does not depend on",
    r"\bno words? for\b": "cannot express",
    r"\bin stated degrees\b": "for given degrees",
    r"\bas plain values\b": "as JSON values",
    r"\bfor ever\b": "forever",
    r"\bthe other way round\b": "vice versa",
    r"\bbeside (?:each other|one another|it|them)\b|\bbeside comm(?:unication|\.)\b": "next to, during",
    r"\bwhole (?:tensor|program|step|plan|model)s?\b": "full, complete",
    r"\b(?:is|are) (?:to be )?said (?:about|of)\b|\bis known of\b": "remarks about, facts about",
    r"(?<!there )\bis no (?:axis|checkpoint|command|number|transformer|plan|file|option|degree)\b": "is not a ...",
    r"\bthat can is\b|\bthat does is\b": "the next valid ... is",
    r"\bhas nobody to\b|\bto talk to\b": "needs at least 2",
    r"\bsays? (?:it|this) twice\b|\bsay the same twice\b": "set the same quantity",
    r"\bmake room, and\b": "free disk space, and",
    r"\bis none of\b": "must be one of",
    r"\bspeaks? of\b": "mentions, uses",
    r"\bfellows?\b": "the corresponding ...",
    r"(?<!there )\bis no (?:folder|kernel|tensor|log|shell script)\b": "is not a ...",
    r"\b(?:one|device|stage) at least\b": "at least one",
    r"\bstands? twice\b": "is given twice",
    r"\bas (?:twofold|torch|torchtitan) runs it\b": "run by ...",
    r"^[^#\n]*\"\"\"What (?:a|an|the) ": "a noun that says what it is",
}


PATTERNS = NAMES | TURNS
AT_WORDS = [pattern for pattern in PATTERNS if pattern.startswith(r"\b")]
ANY_AT_WORDS = re.compile(rf"\b(?:{'|'.join(pattern.removeprefix(chr(92) + 'b') for pattern in AT_WORDS)})")
"""One pass over a text, which is all that nearly every text takes."""


def forbidden(text: str) -> list[str]:
    """What `text` should say otherwise, one line each."""
    skipped = [] if ANY_AT_WORDS.search(text) else AT_WORDS
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}; say {better!r}"
        for pattern, better in PATTERNS.items()
        if pattern not in skipped
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def test_words_that_the_project_does_not_use() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found = {
        str(path.relative_to(ROOT)): forbidden(path.read_text()) for path in [*paths, *(ROOT / name for name in PAGES)]
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_forbidden_words_are_found() -> None:
    text = "a slow rank takes so many times as long\nwritten whole or not at all\nfine, so many of them\nan upon"
    assert [line.split(":")[0] for line in forbidden(text)] == ["line 2", "line 1", "line 4"]
