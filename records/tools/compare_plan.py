"""Compare a plan with a measured step of the same settings: ms by class of GPU kernels.

    python records/tools/compare_plan.py PLAN.txt TRACE.json.gz

PLAN.txt is the output of plan.py, and TRACE.json.gz a trace that step_profile.py wrote on a GPU.
Newton-Schulz counts as products. For collectives, the plan shows how long ranks wait for them, and
the trace how long they take.
"""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

from runlog import argument_parser, command, packages, require

with packages():
    from report import markdown

CLASSES = {  # patterns of a plan's parts and of CUDA kernels' names; the first match counts
    "Triton kernels": "^triton|^element-wise|^embedding's",
    "collectives": "^communication|nccl",
    "attention": "^attention|flash|fmha|sdpa",
    "products": "^products|^Newton-Schulz|gemm|nvjet|cutlass|cublas|xmma",
    "step": "^step$",
    "other": "",
}


def ms_by_class(timed_names):
    """Add up (name, ms) pairs by the class of the name."""
    total = Counter()
    for name, ms in timed_names:
        kind = next(kind for kind in CLASSES if re.search(CLASSES[kind], name, re.I))
        total[kind] += float(ms)
    return total


def main(argv):
    """Print a row for each class."""
    parser = argument_parser(__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("trace", type=Path)
    paths = parser.parse_args(argv)
    planned = ms_by_class(
        re.findall(r"^\| (.+?) \|.* ([\d.]+) \| [\d.]+% \|$", paths.plan.read_text(), re.M)
    )
    require(planned, f"{paths.plan} holds no plan: give the output of plan.py")
    events = json.loads(gzip.decompress(paths.trace.read_bytes()))["traceEvents"]
    steps = [e for e in events if (e.get("cat"), e["name"]) == ("user_annotation", "step")]
    require(steps, f"{paths.trace} has no range named step: give a trace of step_profile.py")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    measured = ms_by_class((e["name"], e["dur"] / 1000 / len(steps)) for e in steps + kernels)
    rows = []
    for kind in CLASSES:
        ratio = f"{measured[kind] / planned[kind]:.2f}" if planned[kind] else "n/a"
        rows.append([kind, f"{planned[kind]:.2f}", f"{measured[kind]:.2f}", ratio])
    print(markdown(["kernels", "planned, ms per step", "measured", "measured / planned"], rows))


if __name__ == "__main__":
    command(main)
