"""One table from outputs of tests/bench/bench_step.py.

    python records/tools/lever_table.py FILE... [--only=A,B]

A lever's step and memory come from the first file that timed it, its cold start and its loss from
the first that has them. Ratios are to the script's own step in the same rounds. n/a: not measured.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import command, markdown
from runlog import ROOT

ROW = re.compile(
    r"(?P<name>\S.*?) +(?P<ms>[\d.]+) +(?P<ratio>[\d.]+) "
    r"\((?P<low>\d+\.\d+)\.\.(?P<high>[\d.]+)\) +(?P<mfu>\S+) "
    r"+(?P<mib>\d+) \((?P<memory>[\d.]+)\) +(?P<reserved>\S+) "
    r"+(?P<cold>\S+) +(?P<warm>\S+) +(?P<graphs>\d+) +(?P<loss>\S+)"
)
LEFT_OUT = re.compile(r"(?P<name>\S.*?) +(?P<why>n/a: .*|failed: .*)")
HEAD = (
    "lever",
    "step",
    "peak memory",
    "reserved, MiB",
    "MFU",
    "cold start, s",
    "warm start, s",
    "graphs",
    "loss",
)


def rows(path):
    """Return {lever: list of its rows, dicts} of a file; of one that was left out, {'why': ...}."""
    found = {}
    for line in Path(path).read_text().splitlines():
        if line.startswith("seconds "):
            continue
        if match := ROW.fullmatch(line) or LEFT_OUT.fullmatch(line):
            found.setdefault(match["name"].strip(), []).append(match.groupdict())
    return found


def first(files, name, key):
    """Return the first value of a lever that is not n/a."""
    for file in files:
        for row in file.get(name, ()):
            if row.get(key, "n/a") != "n/a":
                return row[key]
    return "n/a"


def line(files, name):
    """Return a lever's cells."""
    if first(files, name, "ms") == "n/a":
        return name, first(files, name, "why"), *["n/a"] * 7
    groups = ([row for row in file.get(name, ()) if "ms" in row] for file in files)
    timed, *more = next(group for group in groups if group)
    base = name.startswith("script")
    same = [float(row["ms"]) for row in (timed, *more)]
    step = f"{timed['ratio']} ({timed['low']} to {timed['high']})"
    if base:
        step = f"{min(same):.0f} to {max(same):.0f} ms"
    memory = f"{timed['mib']} MiB" if base else timed["memory"]
    keys = "reserved", "mfu", "cold", "warm", "graphs", "loss"
    figures = (first(files, name, key) for key in keys)
    return name, step, memory, *figures


def main(argv):
    only = [a.removeprefix("--only=").split(",") for a in argv if a.startswith("--only=")]
    paths = [a for a in argv if not a.startswith("--")]
    if not paths:
        raise ValueError("name files that tests/bench/bench_step.py printed")
    files = [rows(ROOT / path) for path in paths]
    names = only[0] if only else list(dict.fromkeys(name for file in files for name in file))
    names.sort(key=lambda name: name != "script")
    if unknown := [name for name in names if not any(name in file for file in files)]:
        raise ValueError(f"{unknown} are in none of {paths}")
    print(markdown(HEAD, [line(files, name) for name in names]))


if __name__ == "__main__":
    command(main)
