"""Compare a plan with a measured step of the same settings: ms by class of GPU kernels.

    python records/tools/compare_plan.py PLAN.txt TRACE.json.gz

PLAN.txt: what plan.py printed. TRACE.json.gz: what step_profile.py wrote on a GPU. For collectives,
a plan shows the time that ranks wait for them, and a trace the time that they take.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

from report import command, markdown

CLASSES = {  # beginnings of parts of the plan, and patterns in the names of CUDA kernels
    "collectives": ("communication", "nccl"),
    "optimizers": ("AdamW|Muon|Newton-Schulz|Adagrad", "adam"),
    "attention": ("attention", "flash|fmha|sdpa"),
    "products": ("products", "gemm|nvjet|cutlass|cublas|xmma"),
    "Triton kernels": ("element-wise|embedding's", "triton"),
    "other": ("gradient accumulation|n-grams|other", ""),
    "step": ("step", "step"),
}


def main(argv):
    """Print a row for each class."""
    plan, trace = map(Path, argv)
    planned, measured = Counter(), Counter()
    for part, ms in re.findall(r"^\| (.+?) \|.* ([\d.]+) \| [\d.]+% \|$", plan.read_text(), re.M):
        [kind] = [kind for kind, (parts, _) in CLASSES.items() if re.match(parts, part)]
        planned[kind] += float(ms)
    events = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        events[event.get("cat")].append(event)
    optimizers, _ = CLASSES["optimizers"]
    annotations = events["gpu_user_annotation"]
    ranges = [event for event in annotations if re.fullmatch(optimizers, event["name"])]
    steps = [event["dur"] for event in events["user_annotation"] if event["name"] == "step"]
    if not steps:
        raise ValueError(f"{trace} has no range named step: take a trace of step_profile.py")
    measured["step"] = sum(steps)
    for kernel in events["kernel"]:
        name, start = kernel["name"].lower(), kernel["ts"]
        kind = next(kind for kind, (_, names) in CLASSES.items() if re.search(names, name))
        if kind != "collectives" and any(0 <= start - e["ts"] < e["dur"] for e in ranges):
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
