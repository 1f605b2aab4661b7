"""Time training steps of one preset with single settings changed, in turn.

    python records/2026-11-25_Wishes/factors.py [--preset=NAME]

Each arm is a process of spin.py that is compiled once. Prints the median step of each arm in each
of five rounds, in ms, then the medians and ranges of the ratios to the preset as it is.
"""

import statistics
import sys

import spin

ARMS = {
    "as it is": ({}, []),
    "OMP_NUM_THREADS=1": ({"OMP_NUM_THREADS": "1"}, []),
    "--compile=False": ({}, ["--compile=False"]),
    "--device_batch_size=4": ({}, ["--device_batch_size=4"]),
    "--device_batch_size=1": ({}, ["--device_batch_size=1"]),
}


def main(argv):
    argv = argv or ["--preset=text"]
    print(*argv, flush=True)
    processes = {}
    for name, (environment, arguments) in ARMS.items():
        spin.POLICIES[name] = environment | {"GOMP_SPINCOUNT": "1000"}
        processes[name] = spin.start(name, argv + arguments)
        spin.train(processes[name])  # the first steps create the states of the optimizers
    times = {name: [] for name in ARMS}
    for number in range(1, 6):
        for name, process in processes.items():
            times[name].append(spin.train(process))
        print(f"round {number}:", *(f"{name} {times[name][-1]:.0f}," for name in ARMS), flush=True)
    print("\n| setting | ms | of the time as it is |\n|---|---|---|")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["as it is"])]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {name} | {statistics.median(values):.0f} | {spread} |")
        processes[name].kill()


if __name__ == "__main__":
    main(sys.argv[1:])
