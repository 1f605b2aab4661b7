"""The profile: its table and its traces name all parts of a step."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import step_profile
import train_modern
from conftest import MODERN, ROOT, trained
from step_profile import PROFILED

from train_gpt2 import StopRequest

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"


def ranges_in_traces(printed):
    """Return (the number of traces, {name: how often this range is in them})."""
    folder = Path(re.search(r"perfetto.dev: (\S+)$", printed, re.M)[1])
    counts = Counter()
    for trace in folder.iterdir():
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        counts.update(event["name"] for event in events if event.get("cat") == "user_annotation")
    return len([*folder.iterdir()]), counts


def test_the_steps_of_another_script_are_profiled(tiny, capsys):
    recipe = train_modern.RECIPE
    step_profile.profile_run(recipe.settings(**{**tiny, **MODERN}), recipe, StopRequest())
    _, counts = ranges_in_traces(capsys.readouterr().out)
    # Calls per step, for three stacks of matrices: 8 of attention and 2 of each shape of the MLP
    calls = {"train_step": 1, "forward": 6, "Muon": 1, "Newton-Schulz": 3, "AdamW": 1}
    assert {part: counts[part] / PROFILED for part in calls} == calls


def test_the_command_prints_a_table_and_writes_a_trace_of_each_rank(tiny):
    printed = trained(tiny, 2, SCRIPT)
    # Calls per step on all ranks, for 12 matrices
    calls = {"forward": 6, "backward": 6, "Newton-Schulz": 12}
    each_rank = ["train_step", "batch", "gradient sums", "AdamW", "Muon"]
    calls |= dict.fromkeys(each_rank, 2) | {"waits for loss": 4}
    calls["waits for ranks"] = 6  # on each: all gradients, the updates of Muon, and the loss
    traces, counts = ranges_in_traces(printed)
    assert traces == 2
    assert {part: counts[part] / PROFILED for part in calls} == calls
    printed_parts = re.findall(r"^(\S.*?) +[\d.]+ ms$", printed, re.M)
    assert sorted(printed_parts) == sorted([*calls, "ProfilerStep*"])
    assert printed.count("Self CPU time total") == 1  # rank 0 alone prints
    assert [path.name[:8] for path in Path(tiny["log_dir"]).iterdir()] == ["profile_"]
