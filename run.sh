#!/usr/bin/env bash
# bash run.sh [--name=value ...]         train GPT-2 124M on all GPUs or, without one, a small GPT
# bash run.sh modern [--name=value ...]  train the modern model; on a CPU, --preset=small or text
# bash run.sh repeat N [modern] [...]    train with N seeds and print the mean loss
# bash run.sh profile [modern] [...]     show where the time of a step goes
# bash run.sh pack INPUT... --out DIR    turn your own text into training data
# bash run.sh TOOL [...]                 run a tool of records/tools: sample, evaluate, export, ...
# bash run.sh test [...]                 run the test suite, or pytest with these arguments
# Data are prepared first. You are asked before FineWeb is downloaded, unless --yes is given. The environment
# variables NPROC and PYTHON set the number of processes and the interpreter. data/ and logs/ are
# relative to the current folder; .venv is beside run.sh.
[ -n "${BASH_VERSION:-}" ] || { echo "run.sh: start it with: bash run.sh" >&2; exit 1; }
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=$root/records/tools
command=${1:-}

fail() { echo "run.sh: $*" >&2; exit 1; }
[[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]] ||
    fail "NPROC=$NPROC must be a number of processes from 1 to 9999; unset it to start one per GPU"
case $command in
"" | -* | modern | test | profile | pack) ;;
*)
    # Only files with this line are tools; the others are modules that tools import.
    grep -qs '^if __name__ == "__main__":' "$tools/$command.py" ||
        fail "$command is neither a setting (--name=value) nor a tool: see the top of run.sh" ;;
esac

# ---- Packages: use $PYTHON if it has all of them, else .venv, and install what is missing there
requirements=requirements.txt
[[ ! $command =~ ^(report|compare|repeat|export|test)$ ]] || requirements+=" records/requirements.txt"
[ "$command" != test ] || requirements+=" tests/requirements.txt"
names=$(cd "$root" && grep -hv ';' $requirements | grep -o '^[a-z][a-z_-]*' || true)
missing() {  # print the first package that an interpreter lacks, from the last line of a traceback
    "$1" -c "import sys
from importlib.metadata import version
for name in sys.argv[1:]:
    version(name)
assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 5), 'torch is older than 2.5'
assert int(version('huggingface_hub').split('.')[0]) >= 1, 'huggingface_hub is older than 1'" \
        $names 2>&1 | tail -n 1 | sed 's/.*: //' || true
}
is_new() { "$1" -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; }
python=${PYTHON:-python3}
[[ $python != */* || $python = /* ]] || python=$PWD/$python  # run.sh may change the folder
is_new "$python" || fail "$python is not Python 3.10 or newer: install it, and set PYTHON"
if [ -n "$(missing "$python")" ]; then
    venv=$root/.venv
    is_new "$venv/bin/python" || "$python" -m venv --clear "$venv"
    if [ -n "$(missing "$venv/bin/python")" ]; then
        "$venv/bin/python" -m pip --version >/dev/null ||
            fail "$venv has no pip, perhaps because its creation was interrupted or the system lacks python3-venv: delete it, and start again"
        echo "$python: $(missing "$python"); installing the packages into $venv"
        "$venv/bin/python" -m pip install -r "$root/${requirements##* }"  # the last file includes the others
    fi
    python=$venv/bin/python
fi

# By default, idle threads of libgomp busy-wait so long that they slow down training and other programs.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

# PyTorch would start a thread for each core, even in a container that is limited to a few.
group=/sys/fs/cgroup
# The quota and the period in microseconds: cgroup v2, or else v1.
limits=$(cat $group/cpu.max $group/cpu/cpu.cfs_{quota,period}_us 2>/dev/null | tr '\n' ' ' || true)
if [[ -z ${OMP_NUM_THREADS:-} && ${NPROC:-1} = 1 && $limits =~ ^([0-9]+)\ ([0-9]+) ]]; then
    threads=$((BASH_REMATCH[1] / BASH_REMATCH[2]))
    [ "$threads" -ge "$(getconf _NPROCESSORS_ONLN)" ] || export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))
fi

# ---- Commands that do not train
case $command in
test)
    cd "$root"
    [ $# -gt 1 ] || set -- test -n 2 --dist worksteal
    OMP_NUM_THREADS=1 exec "$python" -m pytest "${@:2}" ;;
pack) exec "$python" "$root/data/pack.py" "${@:2}" ;;
"" | -* | modern | repeat | profile) ;;
*) exec "$python" "$tools/$command.py" "${@:2}" ;;
esac

# ---- Training: which script, its settings, its data, its processes
runs=
if [ "$command" = repeat ]; then
    runs=${2:-}
    [[ $runs =~ ^[1-9][0-9]*$ ]] || fail "repeat needs the number of runs: bash run.sh repeat 5"
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
if [[ " $* " != *" --preset"[=\ ]"cpu "* ]]; then
    gpus=$("$python" -c "
import glob, sys
count = 0
if any(map(glob.glob, ('/dev/nvidia*', '/dev/nvhost*', '/dev/kfd', '/dev/dxg'))):
    import torch
    count = torch.cuda.device_count()
    if not count:
        advice = 'install a build for it, or a newer driver; training on the CPU now'
        print(f'run.sh: torch {torch.__version__} finds no GPU here: {advice}', file=sys.stderr)
print(count)")
fi
settings=()
[ -n "$word" ] || [ "$gpus" -gt 0 ] || settings+=(--preset=cpu)  # a later --preset wins
yes=
for argument; do
    if [ "$argument" = --yes ]; then yes=--yes; else settings+=("$argument"); fi
done
set -- $word ${settings[@]+"${settings[@]}"}
[[ " $* " = *" --help "* || " $* " = *" -h "* ]] || "$python" "$root/data/prepare.py" "$@" $yes

processes=${NPROC:-$((gpus > 1 ? gpus : 1))}
if [ "$command" = repeat ]; then
    NPROC=$processes exec "$python" "$tools/repeat.py" "$runs" "$@"
elif [ "$command" = profile ]; then
    script=$tools/step_profile.py
elif [ -n "$word" ]; then
    script=$root/records/modern/train_modern.py
    shift
elif [ -z "$command" ] && [ "$gpus" -eq 0 ] && [ "$processes" -eq 1 ]; then
    exec "$python" "$tools/first_run.py"  # trains, and ends with a chart and a sample
else
    script=$root/train_gpt2.py
fi
[ "$processes" -gt 1 ] || exec "$python" "$script" "$@"
# torchrun handles SIGHUP even under nohup, so a closed terminal would stop the run. trap -p prints
# HUP if it has been ignored from the start. Then leave it out of torchrun's signals.
[ -z "$(trap -p HUP)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" "$script" "$@"
