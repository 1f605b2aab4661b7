"""Print the table of this record: `python records/2026-11-25_Minutes/table.py`."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
TEXTS = {
    "mine": "tiny Shakespeare, 1.0 MB",
    "novels": "novels, 11 MB",
    "torch": "PyTorch's sources, 46 MB",
    "gpt2": "novels in GPT-2's tokens",
}
BYTES_PER_TOKEN = {"gpt2": 110993 / 25088}  # of the validation tokens; 1 in the other texts


def result(name):
    """Return the steps, the nats per byte, and the minutes of training and validation of a run."""
    log = (FOLDER / "logs" / f"{name}.txt").read_text()
    steps = int(re.findall(r"^step:(\d+)/", log, re.M)[-1])
    loss = float(re.search(r"^result val_loss:(\S+)", log, re.M)[1])
    loss /= BYTES_PER_TOKEN.get(name.split("_")[1], 1)
    seconds = re.search(r"^compile:.*", log, re.M)[0]
    training, validation = (
        float(re.search(rf"{x}:(\S+)s", seconds)[1]) for x in ("train", "validation")
    )
    return steps, loss, (training + validation) / 60


COLUMNS = ["text", "asked, min", "predicted", "real", "real / predicted", "model", "steps"]
COLUMNS += ["times read", "loss", "steps of `text`", "its loss"]
print("|", " | ".join(COLUMNS), "|")
print("|" + "---|" * len(COLUMNS))
for text, title in TEXTS.items():
    for asked in (3, 15, 60):
        check = FOLDER / "checks" / f"rule_{text}_{asked}.txt"
        if not check.exists():
            continue
        found = r"about (\S+) minutes.*; the run reads the text (\S+)"
        predicted, times = re.search(found, check.read_text()).groups()
        model = re.search(r"^settings: (\d+ layers with \d+) channels", check.read_text(), re.M)[1]
        steps, loss, minutes = result(f"rule_{text}_{asked}")
        cells = [title, asked, predicted, f"{minutes:.1f}", f"{minutes / float(predicted):.2f}"]
        cells += [model.replace(" layers with ", " x "), f"{steps:,}", times, f"**{loss:.4f}**"]
        if (FOLDER / "logs" / f"text_{text}_{asked}.txt").exists():
            steps, loss, minutes = result(f"text_{text}_{asked}")
            cells += [f"{steps:,}", f"{loss:.4f}"]
        else:
            cells += ["-", "not run"]
        print("|", " | ".join(map(str, cells)), "|")
