"""Write what is kept anew: `python -m tests.kept`; with `captures`, the graphs of captured modules."""

import argparse

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
    parser = argparse.ArgumentParser(prog="python -m tests.kept", description=__doc__)
    parser.add_argument("captures", nargs="?", choices=["captures"])
    write("kept_captures" if parser.parse_args().captures else "kept")
