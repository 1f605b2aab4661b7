#!/usr/bin/env bash
# bash run.sh [--name=value ...]         train GPT-2 124M on all GPUs or, without one, a small GPT
# bash run.sh modern [--name=value ...]  train the modern model; on a CPU, --preset=small or text
# bash run.sh repeat N [modern] [...]    train with N seeds and print the mean loss
# bash run.sh profile [modern] [...]     show where the time of a step goes
# bash run.sh pack INPUT... --out DIR    turn your own text into training data
# bash run.sh TOOL [...]                 run a tool: sample, evaluate, export, report, compare, plan
# bash run.sh test [...]                 run the test suite, or pytest with these arguments
#
# Data are prepared first. You are asked before FineWeb is downloaded, unless --yes is given.
# The environment variables NPROC and PYTHON set the number of processes and the interpreter.
# data/ and logs/ are relative to the current folder. If the interpreter lacks packages, they are
# installed into .venv, beside run.sh; PyTorch takes several GB, but less for CPUs (see README.md).

[ -n "${BASH_VERSION:-}" ] || { echo "run.sh: start it with: bash run.sh" >&2; exit 1; }
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null && pwd)  # with CDPATH, cd prints
tools=$root/records/tools
command=${1:-}

fail() { echo "run.sh: $*" >&2; exit 1; }
[[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]] ||
    fail "NPROC=$NPROC must be a number of processes from 1 to 9999; unset it to start one per GPU"
case $command in
--help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;  # the comment at the top
"" | -* | modern | test | profile | pack) ;;
*)
    # Only files with this line are tools; the others are modules that tools import.
    grep -qs '^if __name__ == "__main__":' "$tools/$command.py" ||
        fail "$command is neither a setting (--name=value) nor a command: see bash run.sh --help" ;;
esac

# ---- Packages: use $PYTHON if it has all of them, else .venv, and install what is missing there
requirements=requirements.txt
case $command in
report | compare | repeat | export) requirements+=" records/requirements.txt" ;;
test) requirements+=" records/requirements.txt tests/requirements.txt" ;;
esac
# The names in these files, without packages that only some platforms need.
names=$(cd "$root" && grep -hv ';' $requirements | grep -o '^[a-z][a-z_-]*' || true)
missing() {  # print what an interpreter lacks
    "$1" -c "import sys
from importlib.metadata import PackageNotFoundError, version
# The oldest versions that work in your own environment; requirements.txt names those to install.
oldest = {'torch': (2, 5), 'huggingface_hub': (1, 0), 'tiktoken': (0, 9)}
for name in sys.argv[1:]:
    try:
        found = version(name)
    except PackageNotFoundError:
        print(name, 'is missing')
        break
    if name in oldest and tuple(map(int, found.split('.')[:2])) < oldest[name]:
        print(name, found, 'is too old')
        break" $names || echo "its packages cannot be listed"
}
is_new() { "$1" -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; }
python=${PYTHON:-python3}
if [[ $python = */* && $python != /* ]]; then
    python=$PWD/$python  # run.sh may change the folder
fi
is_new "$python" ||
    fail "$python is not Python 3.10 or newer: install a newer Python, and set PYTHON to its path"
if [ -n "$(missing "$python")" ]; then
    venv=$root/.venv
    if [ ! -e "$venv" ]; then
        if [[ $command = --help || $command = -h ]]; then
            echo "When the packages are installed (bash run.sh does this), --help also lists the settings."
            exit
        fi
        "$python" -m venv "$venv"
    fi
    is_new "$venv/bin/python" ||
        fail "$venv has no working Python 3.10 or newer: delete it, and start again"
    if [ -n "$(missing "$venv/bin/python")" ]; then
        "$venv/bin/python" -m pip --version >/dev/null ||
            fail "$venv has no pip, perhaps because its creation was interrupted or the system lacks python3-venv: delete it, and start again"
        echo "$python: $(missing "$python"); installing the packages into $venv"
        "$venv/bin/python" -m pip install -r "$root/${requirements##* }"  # the last file includes the others
    fi
    python=$venv/bin/python
fi

# By default, idle threads of libgomp busy-wait so long that training beside a busy program was more
# than ten times as slow. Lower counts are better on a busy machine, higher ones on an idle machine.
if [ -z "${OMP_WAIT_POLICY:-}" ]; then
    export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
fi

# PyTorch would start a thread for each core, even in a container that is limited to a few.
threads_are_limited=
group=/sys/fs/cgroup
# The quota and the period in microseconds: cgroup v2, or else v1.
limits=$(cat $group/cpu.max $group/cpu/cpu.cfs_{quota,period}_us 2>/dev/null | tr '\n' ' ' || true)
if [[ -z ${OMP_NUM_THREADS:-} && ${NPROC:-1} = 1 && $limits =~ ^([0-9]+)\ ([0-9]+) ]]; then
    limit=$((BASH_REMATCH[1] / BASH_REMATCH[2]))
    if [ "$limit" -lt "$(getconf _NPROCESSORS_ONLN)" ]; then
        export OMP_NUM_THREADS=$((limit > 1 ? limit : 1))
        threads_are_limited=yes
    fi
fi

# ---- Commands that do not train
case $command in
test)
    cd "$root"
    export OMP_NUM_THREADS=1
    if [ $# -eq 1 ]; then
        exec "$python" -m pytest -n 2 --dist worksteal
    fi
    exec "$python" -m pytest "${@:2}" ;;
pack) exec "$python" "$root/data/pack.py" "${@:2}" ;;
"" | -* | modern | repeat | profile) ;;
*) exec "$python" "$tools/$command.py" "${@:2}" ;;
esac

# ---- Training: which script, its settings, its data, its processes
runs=
if [ "$command" = repeat ]; then
    runs=${2:-}
    [[ $runs =~ ^([2-9]|[1-9][0-9]+)$ ]] ||
        fail "repeat needs the number of runs, at least 2: bash run.sh repeat 5"
    shift 2
elif [ "$command" = profile ]; then
    shift
fi
word=
if [ "${1:-}" = modern ]; then
    word=modern
    shift
fi
# Importing torch is slow, so ask it for GPUs only if a GPU driver is present.
gpus=0
if [[ " $* " != *" --preset"[=\ ]"cpu "* && " $* " != *" --device"[=\ ]"cpu "* ]]; then
    gpus=$("$python" -c "
import glob, sys
count = 0
if any(map(glob.glob, ('/dev/nvidia*', '/dev/nvhost*', '/dev/kfd', '/dev/dxg'))):
    import torch
    count = torch.cuda.device_count()
    if not count:
        advice = 'if this machine has one, check CUDA_VISIBLE_DEVICES, the driver, and that torch is built for it'
        print(f'run.sh: torch {torch.__version__} finds no GPU: {advice}', file=sys.stderr)
print(count)")
fi
settings=()
if [ -z "$word" ] && [ "$gpus" -eq 0 ]; then
    settings+=(--preset=cpu)  # a later --preset wins
fi
yes=
for argument; do
    if [ "$argument" = --yes ]; then yes=--yes; else settings+=("$argument"); fi
done
set -- ${settings[@]+"${settings[@]}"}  # the bash of macOS takes an empty array for an unset one
if [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then
    "$python" "$root/data/prepare.py" $word "$@" $yes
else
    NPROC=1  # print the help once
fi

processes=${NPROC:-$((gpus > 1 ? gpus : 1))}
if [ "$processes" -gt 1 ] && [ -n "$threads_are_limited" ]; then
    unset OMP_NUM_THREADS  # torchrun gives each process one thread
fi
if [ "$command" = repeat ]; then
    NPROC=$processes exec "$python" "$tools/repeat.py" "$runs" $word "$@"
elif [ "$command" = profile ]; then
    script=$tools/step_profile.py
    set -- $word "$@"
elif [ -n "$word" ]; then
    script=$root/records/modern/train_modern.py
elif [ -z "$command" ] && [ "$gpus" -eq 0 ] && [ "$processes" -eq 1 ]; then
    exec "$python" "$tools/first_run.py"  # trains, and ends with a chart and a sample
else
    script=$root/train_gpt2.py
fi
if [ "$processes" -eq 1 ]; then
    exec "$python" "$script" "$@"
fi
# torchrun handles SIGHUP even under nohup, so a closed terminal would stop the run. trap -p prints
# HUP if it has been ignored from the start. Then leave it out of torchrun's signals.
if [ -n "$(trap -p HUP)" ]; then
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
fi
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" "$script" "$@"
