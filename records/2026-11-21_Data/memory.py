"""Peak memory of data/pack.py, all its processes together, for inputs of growing size.

    python records/2026-11-21_Data/memory.py BOOKS.jsonl.xz FOLDER [GB...]

The books go through standard input, as often as the size wants. (Equal chunks are encoded once, so
the speed says nothing; the documents, their order and the shards are all there.)
"""

import lzma
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def shared_out_kib(pid):
    """Return the process's memory in KiB, pages shared by n processes counted 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def pack(content, size, out):
    """Return (peak MiB, documents) of packing content again and again, up to size bytes."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "data" / "pack.py", "-", "--format", "jsonl", "--out", out],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def feed():
        for _ in range(max(1, round(size / len(content)))):
            process.stdin.write(content)
        process.stdin.close()

    threading.Thread(target=feed).start()
    peak = 0
    while process.poll() is None:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        pids = [process.pid, *map(int, children.stdout.split())]
        peak = max(peak, sum(map(shared_out_kib, pids)))
        time.sleep(0.2)
    assert process.returncode == 0
    return peak / 1024, process.stdout.read().decode().splitlines()[0]


def main():
    content, folder = lzma.open(sys.argv[1]).read(), Path(sys.argv[2])
    print(f"{os.cpu_count()} cores")
    for size in map(float, sys.argv[3:] or ["0.1", "1", "10"]):
        peak, line = pack(content, size * 1e9, folder / f"{size:g}")
        print(f"{size:5g} GB of JSON lines: peak {peak:.0f} MiB; {line}", flush=True)


if __name__ == "__main__":
    main()
