"""The profile: its table and its traces name all parts of a step."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import step_profile
from conftest import MODERN, ROOT, trained
from step_profile import PROFILED

from train_gpt2 import Hyperparameters, StopRequest

SCRIPT = ROOT / "records" / "tools" / "step_profile.py"


def ranges_in_traces(printed):
    """Return (the number of traces, {name: how often this range is in them})."""
    folder = Path(re.search(r"perfetto.dev: (\S+)$", printed, re.M)[1])
    counts = Counter()
    for trace in folder.iterdir():
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        counts.update(event["name"] for event in events if event.get("cat") == "user_annotation")
    return len([*folder.iterdir()]), counts


def test_half_of_the_profiled_steps_update_with_adamw(tiny, capsys):
    settings = {**tiny, **MODERN, "adamw_every": 2}
    step_profile.main(Hyperparameters(**settings), StopRequest())
    _, counts = ranges_in_traces(capsys.readouterr().out)
    steps = 2 * PROFILED
    expected = [steps, steps, steps // 2, steps // 2]
    assert [counts[part] for part in ("train_step", "Muon", "AdamW", "Adagrad")] == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_tables_and_writes_traces(processes, tiny):
    printed = trained(tiny, processes, SCRIPT)
    # Calls per step on all ranks, for 12 matrices
    calls = {"forward": 6, "backward": 6, "Newton-Schulz": 12}
    each_rank = ["train_step", "batch", "log_step", "gradient sums", "AdamW", "Muon"]
    calls |= dict.fromkeys(each_rank, processes)
    if processes == 2:
        calls["waits for ranks"] = 6  # on each: all gradients, the updates of Muon, and the loss
    traces, counts = ranges_in_traces(printed)
    assert traces == processes
    assert {part: counts[part] / PROFILED for part in calls} == calls
    printed_parts = re.findall(r"^(\S.*?) +[\d.]+ ms$", printed, re.M)
    assert sorted(printed_parts) == sorted([*calls, "ProfilerStep*"])
    assert printed.count("Self CPU time total") == 1  # rank 0 alone prints
    assert [path.name[:8] for path in Path(tiny["log_dir"]).iterdir()] == ["profile_"]
