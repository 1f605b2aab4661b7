"""Set a plan beside a measured step of the same settings: ms by class of GPU kernels.

    python records/tools/compare_plan.py PLAN.txt TRACE.json.gz

PLAN.txt: what plan.py printed. TRACE.json.gz: what step_profile.py wrote on a GPU. Of collectives,
a plan shows the time that ranks wait for them, and a trace the time that they take.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

from report import command, markdown
from step_profile import kernel_class

CLASSES = {  # what the parts of a plan begin with; kernel_class uses the same names
    "products": "products",
    "attention": "attention",
    "element-wise": "element-wise|embedding's",
    "optimizers": "AdamW|Muon|Newton-Schulz|Adagrad",
    "collectives": "communication",
    "other": "gradient accumulation|n-grams|other",
    "step": "step",
}


def main(argv):
    """Print a row for each class."""
    plan, trace = map(Path, argv)
    planned, measured = Counter(), Counter()
    for part, ms in re.findall(r"^\| (.+?) \|.* ([\d.]+) \| [\d.]+% \|$", plan.read_text(), re.M):
        [kind] = [kind for kind, parts in CLASSES.items() if re.match(parts, part)]
        planned[kind] += float(ms)
    events = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        events[event.get("cat")].append(event)
    annotations = events["gpu_user_annotation"]
    optimizing = [e for e in annotations if re.fullmatch(CLASSES["optimizers"], e["name"])]
    steps = [event["dur"] for event in events["user_annotation"] if event["name"] == "step"]
    measured["step"] = sum(steps)
    for kernel in events["kernel"]:
        kind = kernel_class(kernel["name"])
        in_optimizer = any(0 <= kernel["ts"] - e["ts"] < e["dur"] for e in optimizing)
        if in_optimizer and kind != "collectives":
            kind = "optimizers"
        measured[kind] += kernel["dur"]
    rows = []
    for kind in CLASSES:
        ms = measured[kind] / 1000 / len(steps)
        ratio = f"{ms / planned[kind]:.2f}" if planned[kind] else "n/a"
        rows.append([kind, f"{planned[kind]:.2f}", f"{ms:.2f}", ratio])
    print(markdown(["kernels", "planned, ms a step", "measured", "measured / planned"], rows))


if __name__ == "__main__":
    command(main)
