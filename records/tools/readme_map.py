"""Write the map of train_gpt2.py's sections into README.md.

    python records/tools/readme_map.py

The map is a table of line numbers and titles. It stands between `<!-- map -->` and `<!-- end -->`.
"""

import re

from report import command
from runlog import ROOT, require

README = ROOT / "README.md"
SCRIPT = ROOT / "train_gpt2.py"
RULER = re.compile(r"# ---- (.+?)[ -]*")
MARKED = re.compile(r"(?<=<!-- map -->\n).*?(?=<!-- end -->)", re.S)


def file_map(source):
    """Return a Markdown table of the sections of a source file, which begin with ruler lines."""
    lines = source.splitlines()
    rulers = [(number, RULER.fullmatch(line)) for number, line in enumerate(lines, 1)]
    sections = [(number, match[1]) for number, match in rulers if match]
    ends = [number - 1 for number, _ in sections[1:]] + [len(lines)]
    rows = ["| lines | section |", "|---|---|"]
    for (first, title), end in zip(sections, ends):
        while not lines[end - 1].strip():
            end -= 1
        rows.append(f"| {first}-{end} | {title} |")
    return "\n".join(rows) + "\n"


def readme_is_true():
    """Return whether README.md shows the sections of train_gpt2.py as they are."""
    return MARKED.findall(README.read_text()) == [file_map(SCRIPT.read_text())]


def main(argv):
    text, found = MARKED.subn(lambda _: file_map(SCRIPT.read_text()), README.read_text())
    fix = "it needs `<!-- map -->` and `<!-- end -->`, each once and on a line of its own: add them"
    require(found == 1, f"{README} has {found} places for the map, but {fix}")
    README.write_text(text)


if __name__ == "__main__":
    command(main)
