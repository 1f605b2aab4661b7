#!/usr/bin/env bash
# bash run.sh [--name=value ...]     train the record for this machine. With GPUs, it is GPT-2 124M
#     on FineWeb (loss 3.2755 after 12.0 minutes on 8xH100, according to the public log). run.sh asks
#     before it downloads the shards that the run needs, up to 5.6 GB, unless --yes is given. Without
#     GPUs, it is a model of Python sources, mostly a table of n-grams (loss 1.2968).
# bash run.sh --preset=text          train on your own text, which `bash run.sh pack` prepares
# bash run.sh repeat N [--name=value ...]  train with N seeds and print the mean loss
# bash run.sh test [...]             run the test suite, or pytest with these arguments
# bash run.sh check [--name=value ...]     check that a run with these settings can start here
# bash run.sh profile [--name=value ...]   show where the time of a step goes
# bash run.sh TOOL [...]             run pack or a tool in records/tools: sample, evaluate, ...
# bash run.sh records/<date>_<Name>  train a record again and compare the loss with its runs' spread
# bash run.sh data                   only prepare the data of the CPU record
# The environment variables NPROC and PYTHON set the number of processes and the interpreter. data/ and logs/
# are relative to the current folder. .venv is beside run.sh, and `test` runs there.
# A # ends each of the next four lines, so that they also run with Windows line ends.
fail() { echo "run.sh: $*" >&2; exit 1; } #
if [ -z "${BASH_VERSION:-}" ]; then fail "start it with: bash run.sh"; fi #
if (return 0 2>/dev/null); then echo "run.sh: start it with: bash run.sh" >&2; return 1; fi # it is sourced
! grep -qs $'\r' "$0" || fail "its lines end in CR LF, as on Windows: clone the repository again" #
set -euo pipefail
script=${BASH_SOURCE:-$0}
while [ -L "$script" ]; do  # macOS before 12.3 has no readlink -f
    target=$(readlink "$script")
    [[ $target = /* ]] || target=$(dirname "$script")/$target
    script=$target
done
root=$(CDPATH='' cd "$(dirname "$script")" && pwd)
unset PYTHONSAFEPATH  # with it, Python would not find the modules beside a tool
# Limit the spinning of waiting threads for the tools, too, as train_gpt2.py does for itself.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

trap 'echo "run.sh: stopped" >&2; exit 130' INT

[[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]] ||
    fail "NPROC=$NPROC must be a number of processes from 1 to 9999; unset it to start one per GPU"

tool=$root/records/tools/${1:-none}.py
grep -qs '^if __name__ == "__main__":' "$tool" || tool=  # only files with this line are tools
case "${1:-}" in
"" | -* | test | check | profile | data | pack | records/* | [!-]*/records/*) ;;
*) [ -n "$tool" ] || fail "$1 is neither a setting (--name=value) nor a tool: see the top of $script" ;;
esac

# Use the packages of $PYTHON, or install them into .venv if one is missing. Python runs in $root if
# a file of the current folder could hide a module.
python=${PYTHON:-python3}
case $python in
/*) ;;
*/*) python=$PWD/$python ;;
esac
requirements=requirements.txt
case "${1:-}" in
test) requirements+=" records/requirements.txt tests/requirements.txt" ;;
records/* | [!-]*/records/* | report | compare | repeat | ab | export | track)
    requirements+=" records/requirements.txt" ;;
esac
has_packages="from importlib.metadata import version
for name in '''$(cd "$root" && sed -n 's/^\([a-z_-]*\)[=>][^;]*$/\1/p' $requirements)'''.split():
    version(name)
assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 5), 'torch is older than 2.5'"
if ! reason=$(cd "$root" && "$python" -c "$has_packages" 2>&1); then
    venv=$root/.venv
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    if ! "$venv/bin/python" -c "$has_packages" 2>/dev/null; then
        requirements=${requirements##* }  # the last file includes the others
        echo "$python: ${reason##*: }; installing $requirements into $venv"
        "$venv/bin/python" -m pip install -r "$root/$requirements"
    fi
    python=$venv/bin/python
fi

# Set gpus. Importing torch is slow, so it is only asked if there is a driver of a GPU.
count_gpus() {
    gpus=0
    case " $* " in
    *" --preset"[=\ ]"cpu "*) ;;  # --preset=cpu or --preset cpu: no GPU, even if there are some
    *) gpus=$(cd "$root" && "$python" -c "
import glob, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
if any(map(glob.glob, ('/dev/nvidia*', '/dev/nvhost*', '/dev/kfd', '/dev/dxg'))):
    import torch
    print(torch.cuda.device_count())
else:
    print(0)") ;;
    esac
}

# Replace the shell with NPROC processes of a script; the default is one per GPU, or one.
launch() {
    local processes=${NPROC:-$gpus} torchrun=
    [ "$gpus" -gt 0 ] || set -- "$1" --preset=cpu "${@:2}"  # a later --preset wins
    if [ "$1" = "$root/records/tools/repeat.py" ]; then
        export NPROC=$((processes > 1 ? processes : 1))  # of each run that it starts
    elif [ "$processes" -gt 1 ]; then
        torchrun="-m torch.distributed.run --standalone --nproc_per_node=$processes"
        # Under nohup, torchrun would still stop the run when the terminal is closed.
        [ -z "$(trap -p HUP)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
    fi
    exec "$python" $torchrun "$@"
}

# Succeed if the settings name data that the user has prepared.
has_own_data() {
    case " $*" in
    *" --preset"[=\ ]text* | *" --train_files"*) ;;
    *) false ;;
    esac
}

# Succeed if the manifest in data/torch_sources lists the CPU record's data.
lists_record_data() {
    local manifest=data/torch_sources/manifest.json
    grep -qs 6251e20afb3501d08df7cac6eb197d149fdce9cd53acefd3475b4f8274d36140 $manifest &&
        grep -qs aaf4fab872ea22204bd4b9e49db61e4405d89aaf7b259734d36d0476f8a69aa7 $manifest
}

pack_torch_sources() {
    local folder
    if ! lists_record_data || ! "$python" "$root/data/shards.py" data/torch_sources >/dev/null; then
        folder=$(cd "$root" && "$python" -c "from importlib.util import find_spec
print(*find_spec('torch').submodule_search_locations)")
        # version.py is the one file that differs between the CPU and the CUDA builds
        "$python" "$root/data/pack.py" "$folder" --pattern '*.py' --exclude version.py \
            --encoding bytes --val_fraction 0.02 --hash_only --skip_bad --out data/torch_sources
    fi
    lists_record_data ||
        echo "warning: data/torch_sources differs from the record's data (torch is not 2.13.0?)," \
            "so the loss is not comparable"
}

# Prepare the data of --preset=small: 20M tokens of FineWeb, 40 MB, unless data/small exists.
pack_small() {
    [ ! -e data/small/manifest.json ] || return 0
    "$python" "$root/data/fineweb.py" --part=20000000 --out data/fineweb_part "$@"
    "$python" "$root/data/pack.py" data/fineweb_part/*.bin --encoding gpt2-2048 \
        --val_fraction 0.02 --out data/small
}

case "${1:-}" in
test)
    cd "$root"
    if [ $# -eq 1 ]; then
        pack_torch_sources  # once, before both test processes need it
        set -- test -n 2 --dist worksteal
    fi
    OMP_NUM_THREADS=1 exec "$python" -m pytest "${@:2}" ;;
check | profile)
    count_gpus "$@"
    [ "$gpus" -gt 0 ] || has_own_data "$@" || pack_torch_sources
    [ "$1" = check ] || tool=$root/records/tools/step_profile.py
    launch "$tool" "${@:2}" ;;
data) pack_torch_sources ;;
pack) exec "$python" "$root/data/pack.py" "${@:2}" ;;
records/* | [!-]*/records/*) exec "$python" "$root/records/tools/rerun.py" "$@" ;;
"" | -* | repeat)
    count_gpus "$@"
    script=${tool:-$root/train_gpt2.py} runs=
    if [ -n "$tool" ]; then
        runs=${2:-}
        [[ $runs =~ ^([1-9][0-9]*|-h|--help)$ ]] ||
            fail "repeat needs the number of runs first: bash run.sh repeat 5"
        set -- "${@:3}"
    fi
    case " $runs $*" in
    *" --help"* | *" -h"*) launch "$script" $runs "$@" ;;
    esac
    yes=
    case " $* " in
    *" --yes "*) yes=--yes ;;
    esac
    if [[ " $*" = *" --preset"[=\ ]small* ]]; then
        pack_small $yes
    elif has_own_data "$@"; then
        echo "training on your own data; Ctrl-C saves a checkpoint and exits"
    elif [ "$gpus" -eq 0 ]; then
        echo "training the CPU record; Ctrl-C saves a checkpoint and exits"
        pack_torch_sources
    else
        echo "training on FineWeb; Ctrl-C saves a checkpoint and exits"
        "$python" "$root/data/fineweb.py" "$@"
    fi
    for argument; do  # removes --yes, which is meant for fineweb.py
        shift
        [ "$argument" = --yes ] || set -- "$@" "$argument"
    done
    if [ -n "$tool" ] || [ "$gpus" -gt 0 ] || [ $# -gt 0 ] || [ "${NPROC:-1}" != 1 ]; then
        launch "$script" $runs "$@"
    fi
    # Without arguments, the CPU record ends with a sample, unless a signal stops the training. Both
    # run in one process, because importing torch is slow.
    exec "$python" -c "
import sys
sys.path[:1] = sys.argv[1:]  # without the current folder
import signal, time
from pathlib import Path
import train_gpt2
run_id = time.strftime('cpu-%Y%m%d-%H%M%S')
train_gpt2.cli(['--preset=cpu', f'--run_id={run_id}'])
signal.signal(signal.SIGINT, signal.SIG_DFL)
if Path('logs', run_id, 'model.pt').exists():
    import sample
    sample.main(['def ', '--tokens=200', '--seed=1', f'--weights=logs/{run_id}'])" \
        "$root" "$root/records/tools" ;;
*) exec "$python" "$tool" "${@:2}" ;;
esac
