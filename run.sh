#!/usr/bin/env bash
# bash run.sh [--name=value ...]     train the record for this machine. With GPUs, it is GPT-2 124M
#     on FineWeb. run.sh asks before it downloads the shards that the run needs, up to 5.6 GB, unless
#     --yes is given. Without GPUs, it is a model of Python sources, mostly a table of n-grams.
# bash run.sh --preset=small         train a small model of English, for trying an idea
# bash run.sh --preset=text          train on your own text, which `bash run.sh pack` prepares
# bash run.sh repeat N [--name=value ...]  train with N seeds and print the mean loss
# bash run.sh test [...]             run the test suite, or pytest with these arguments
# bash run.sh profile [--name=value ...]   show where the time of a step goes
# bash run.sh TOOL [...]             run pack or a tool in records/tools: sample, evaluate, ...
# bash run.sh data                   only prepare the data of the CPU benchmark
# The environment variables NPROC and PYTHON set the number of processes and the interpreter.
# data/ and logs/ are relative to the current folder; .venv is beside run.sh.
[ -n "${BASH_VERSION:-}" ] || { echo "run.sh: start it with: bash run.sh" >&2; exit 1; }
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command=${1:-}
tool=$root/records/tools/$command.py

fail() { echo "run.sh: $*" >&2; exit 1; }
[[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]] ||
    fail "NPROC=$NPROC must be a number of processes from 1 to 9999; unset it to start one per GPU"
case $command in
"" | -* | test | profile | data | pack) ;;
*)
    # Only files with this line are tools; the others are modules that tools import.
    grep -qs '^if __name__ == "__main__":' "$tool" ||
        fail "$command is neither a setting (--name=value) nor a tool: see the top of run.sh" ;;
esac

# ---- Packages: those of $PYTHON or, if one is missing, those of .venv, where they are installed
requirements=requirements.txt
[[ ! $command =~ ^(report|compare|repeat|export|test)$ ]] || requirements+=" records/requirements.txt"
[ "$command" != test ] || requirements+=" tests/requirements.txt"
names=$(cd "$root" && grep -hv ';' $requirements | grep -o '^[a-z_]*' || true)
missing() {  # print what an interpreter lacks first
    "$1" -c "import sys
from importlib.metadata import version
for name in sys.argv[1:]:
    version(name)
assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 5), 'torch is older than 2.5'" \
        $names 2>&1 | tail -n 1 | sed 's/.*: //' || true
}
python=${PYTHON:-python3}
if [ -n "$(missing "$python")" ]; then
    venv=$root/.venv
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    if [ -n "$(missing "$venv/bin/python")" ]; then
        echo "$python: $(missing "$python"); installing the packages into $venv"
        "$venv/bin/python" -m pip install -r "$root/${requirements##* }"  # includes the others
    fi
    python=$venv/bin/python
fi

# ---- GPUs. Importing torch is slow, so it is only asked if there is a driver of a GPU
gpus=0
if [[ " $* " != *" --preset"[=\ ]"cpu "* ]]; then
    gpus=$("$python" -c "
import glob
if any(map(glob.glob, ('/dev/nvidia*', '/dev/nvhost*', '/dev/kfd', '/dev/dxg'))):
    import torch
    print(torch.cuda.device_count())
else:
    print(0)")
fi

# ---- Data
# Succeed if data/torch_sources is complete and its manifest lists the CPU benchmark's data.
holds_record_data() (
    cd data/torch_sources 2>/dev/null && [ ! -e .pack ] &&
        grep -qs 6251e20afb3501d08df7cac6eb197d149fdce9cd53acefd3475b4f8274d36140 manifest.json &&
        grep -qs aaf4fab872ea22204bd4b9e49db61e4405d89aaf7b259734d36d0476f8a69aa7 manifest.json
)

pack_torch_sources() {
    if ! holds_record_data; then
        folder=$("$python" -c "from importlib.util import find_spec
print(*find_spec('torch').submodule_search_locations)")
        # version.py is the one file that differs between the CPU and the CUDA builds
        "$python" "$root/data/pack.py" "$folder" --pattern '*.py' --exclude version.py \
            --encoding bytes --val_fraction 0.02 --hash_only --out data/torch_sources
    fi
    holds_record_data ||
        echo "warning: data/torch_sources differs from the record's: the loss is not comparable"
}

# Prepare the data that the settings need.
prepare_data() {
    local yes=
    [[ " $* " != *" --yes "* ]] || yes=--yes
    if [[ " $*" = *" --preset"[=\ ]text* || " $*" = *" --train_files"* ]]; then
        return  # the user's own data
    elif [[ " $*" = *" --preset"[=\ ]small* ]]; then
        [ ! -e data/small/manifest.json ] || return 0
        "$python" "$root/data/fineweb.py" --part=20000000 --out data/fineweb_part $yes  # 40 MB
        "$python" "$root/data/pack.py" data/fineweb_part/*.bin --encoding gpt2-2048 \
            --val_fraction 0.02 --out data/small
    elif [ "$gpus" -eq 0 ]; then
        pack_torch_sources
    else
        "$python" "$root/data/fineweb.py" "$@"
    fi
}

# ---- Commands
case $command in
test)
    cd "$root"
    if [ $# -eq 1 ]; then
        pack_torch_sources  # once, before both test processes need it
        set -- test -n 2 --dist worksteal
    fi
    OMP_NUM_THREADS=1 exec "$python" -m pytest "${@:2}" ;;
data) pack_torch_sources ;;
pack) exec "$python" "$root/data/pack.py" "${@:2}" ;;
"" | -* | repeat | profile)
    script=$root/train_gpt2.py
    if [ "$command" = profile ]; then
        script=$root/records/tools/step_profile.py
        shift
    elif [ "$command" = repeat ]; then
        runs=${2:-}
        [[ $runs =~ ^[1-9][0-9]*$ ]] ||
            fail "repeat needs the number of runs first: bash run.sh repeat 5"
        shift 2
    fi
    [[ " $* " = *" --help "* || " $* " = *" -h "* ]] || prepare_data "$@"
    settings=()
    [ "$gpus" -gt 0 ] || settings+=(--preset=cpu)  # a later --preset wins
    for argument; do
        [ "$argument" = --yes ] || settings+=("$argument")  # it is not a setting
    done
    processes=${NPROC:-$((gpus > 1 ? gpus : 1))}
    if [ "$command" = repeat ]; then
        NPROC=$processes exec "$python" "$tool" "$runs" "${settings[@]}"
    elif [ "$processes" -gt 1 ]; then
        # Under nohup, torchrun would still stop the run when the terminal is closed.
        [ -z "$(trap -p HUP)" ] || export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" \
            "$script" "${settings[@]}"
    elif [ -n "$command" ] || [ "$gpus" -gt 0 ]; then
        exec "$python" "$script" "${settings[@]}"
    fi
    # Without settings, the CPU benchmark ends with a sample, unless a signal stops the training.
    run_id=cpu-$(date +%Y%m%d-%H%M%S)
    "$python" "$script" --preset=cpu --run_id="$run_id"
    [ ! -e "logs/$run_id/model.pt" ] || exec "$python" "$root/records/tools/sample.py" 'def ' \
        --tokens=200 --seed=1 --weights="logs/$run_id" ;;
*) exec "$python" "$tool" "${@:2}" ;;
esac
