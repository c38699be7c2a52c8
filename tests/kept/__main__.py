"""Write what is kept anew: `python -m tests.kept`; with `captures`, the graphs of captured modules."""

import sys

from tests.kept.lines import FOLDER


def write(what: str) -> None:
    if what == "kept_captures":
        from tests.kept.captures import CAPTURES as cases
    else:
        from tests.kept import numbers
        from tests.kept.cases import CASES
        from tests.kept.searches import SEARCHES

        numbers.write()
        cases = CASES | SEARCHES
    lines = [f"{name}: {case()}\n" for name, case in cases.items()]
    (FOLDER / f"{what}.txt").write_text("".join(lines))
    print(f"{FOLDER / what}.txt: {len(lines)} cases")


if __name__ == "__main__":
    write("_".join(["kept", *sys.argv[1:]]))
