"""Compare a plan with a measured step of the same settings: ms by class of GPU kernels.

    python records/tools/compare_plan.py PLAN.txt TRACE.json.gz

PLAN.txt is the output of plan.py, and TRACE.json.gz a trace that step_profile.py wrote on a GPU.
For collectives, the plan shows how long ranks wait for them, and the trace how long they take.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

from report import markdown
from runlog import argument_parser, command, require

CLASSES = {  # patterns: of the plan's parts, from their beginning, and of CUDA kernels' names
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
    parser = argument_parser(__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("trace", type=Path)
    paths = parser.parse_args(argv)
    text = paths.plan.read_text()
    planned, measured = Counter(), Counter()
    for part, ms in re.findall(r"^\| (.+?) \|.* ([\d.]+) \| [\d.]+% \|$", text, re.M):
        [kind] = [kind for kind, (parts, _) in CLASSES.items() if re.match(parts, part)]
        planned[kind] += float(ms)
    require(planned, f"{paths.plan} holds no plan: give the output of plan.py")
    events = defaultdict(list)
    for event in json.loads(gzip.decompress(paths.trace.read_bytes()))["traceEvents"]:
        events[event.get("cat")].append(event)
    steps = [event["dur"] for event in events["user_annotation"] if event["name"] == "step"]
    require(steps, f"{paths.trace} has no range named step: give a trace of step_profile.py")
    measured["step"] = sum(steps)
    optimizers = CLASSES["optimizers"][0]
    ranges = [e for e in events["gpu_user_annotation"] if re.fullmatch(optimizers, e["name"])]
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
