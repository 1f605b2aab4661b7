"""Print the map of train_gpt2.py's sections, which `report.py --refresh` writes into README.md."""

import re

from report import markdown
from runlog import ROOT, command

RULER = re.compile(r"# ---- (.+?)[ -]*")


def file_map(source):
    """Return a Markdown table of the sections of a source file, which begin with ruler lines."""
    lines = source.splitlines()
    rulers = [(number, RULER.fullmatch(line)) for number, line in enumerate(lines, 1)]
    sections = [(number, match[1]) for number, match in rulers if match]
    ends = [number - 1 for number, _ in sections[1:]] + [len(lines)]
    rows = []
    for (first, title), end in zip(sections, ends):
        while not lines[end - 1].strip():
            end -= 1
        rows.append([f"{first}-{end}", title])
    return markdown(["lines", "section"], rows)


def main(argv):
    print(file_map((ROOT / "train_gpt2.py").read_text()))


if __name__ == "__main__":
    command(main)
