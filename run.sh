#!/usr/bin/env bash
# bash run.sh [--name=value ...]        reproduce the record of the machine it stands on
#     with GPUs: GPT-2 124M on FineWeb; train_gpt2.py's defaults, whose public log says loss 3.2755
#                and 12.0 minutes on 8xH100
#     without:   0.4M parameters and a table of n-grams on the bytes of PyTorch's own Python sources:
#                loss 1.2936 (n=10, sd 0.0129), 2 minutes on 2 cores with installation, 0.8 GB
# bash run.sh test [pytest arguments]   run the test suite
# bash run.sh check [--name=value ...]  can this run start here? Device, compiler, data, disk, network
# bash run.sh profile [--name=value ...]   where a step's time goes
# bash run.sh --preset=text             train on your own text, which `bash run.sh pack` prepares
# bash run.sh pack TEXTS --out data/mine [...]   data/pack.py
# bash run.sh sample [PROMPT] [...]     let the newest run write: records/tools/sample.py
# bash run.sh evaluate|export|report|compare|ab [...]   the other tools in records/tools
# bash run.sh records/<date>_<Name>     train a record again from its own log: is the loss within its
#     spread? Arguments: records/tools/rerun.py
# bash run.sh data                      only make the data of the record without GPUs
# NPROC=n sets the number of processes, PYTHON=... the interpreter, SCRIPT=... a copy of the script.
set -euo pipefail
cd "$(dirname "$0")"

if [[ ! ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]]; then
    echo "run.sh: NPROC=$NPROC must be a whole number from 1 to 9999: give the number of processes," \
        "or leave it unset to start one for each GPU" >&2
    exit 1
fi
python=${PYTHON:-python3}
packages="torch, numpy, tiktoken, huggingface_hub, tqdm"
requirements=requirements.txt
case "${1:-}" in
test)
    packages+=", pytest, hypothesis, scipy, matplotlib, transformers, safetensors"
    requirements=tests/requirements.txt ;;
records/* | report | compare | ab)
    packages+=", scipy, matplotlib"
    requirements=records/requirements.txt ;;
export)
    packages+=", transformers, safetensors"
    requirements=records/requirements.txt ;;
esac
check="import $packages
assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 5), 'torch is older than 2.5'"
if ! reason=$("$python" -c "$check" 2>&1); then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    if ! .venv/bin/python -c "$check" 2>/dev/null; then
        echo "$python: ${reason##*$'\n'}; installing $requirements into .venv"
        .venv/bin/python -m pip install -r "$requirements"
    fi
    python=.venv/bin/python
fi

# Start a script of ours in NPROC processes; by default in as many as there are GPUs, or one.
launch() {
    local processes=${NPROC:-$gpus}
    if [ "$processes" -gt 1 ]; then
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" "$@"
    fi
    exec "$python" "$@"
}

is_the_records() {
    sha256sum --check --status <<'SUMS'
6251e20afb3501d08df7cac6eb197d149fdce9cd53acefd3475b4f8274d36140  data/torch_sources/train_000001.bin
aaf4fab872ea22204bd4b9e49db61e4405d89aaf7b259734d36d0476f8a69aa7  data/torch_sources/val_000000.bin
SUMS
}

pack_torch_sources() {
    is_the_records 2>/dev/null || {
        local folder
        folder=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
        # version.py is the one file that differs between the CPU and the CUDA builds
        "$python" data/pack.py "$folder" --pattern '*.py' --exclude version.py \
            --encoding bytes --val_fraction 0.02 --skip_bad --out data/torch_sources
        is_the_records || {
            echo "data: not the record's (another torch than 2.13.0?); the loss is not comparable"
            return
        }
    }
    echo "data: the record's own (torch 2.13.0)"
}

# The whole suite as two processes of about the same time: many tests leave a core idle.
test_in_halves() {
    local of_runs=(tests/test_run.py tests/test_survive.py tests/test_alone.py) status=0 output
    export OMP_NUM_THREADS=1
    output=$(mktemp)
    "$python" -m pytest "${of_runs[@]/#/--ignore=}" >"$output" 2>&1 &
    trap "kill $! 2>/dev/null || :; rm -f '$output'" EXIT
    "$python" -m pytest "${of_runs[@]}" || status=$?
    wait $! || status=$?
    cat "$output"
    return "$status"
}

gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
case " $* " in
*" --preset"[=\ ]"cpu "*) gpus=0 ;;  # the CPU record, also beside GPUs
esac
settings=()
[ "$gpus" -gt 0 ] || settings=(--preset=cpu)

case "${1:-}" in
test)
    [ $# -eq 1 ] || exec "$python" -m pytest "${@:2}"
    test_in_halves ;;
check) launch records/tools/check.py "${settings[@]}" "${@:2}" ;;
profile)
    [ "$gpus" -gt 0 ] || pack_torch_sources
    launch records/tools/step_profile.py "${settings[@]}" "${@:2}" ;;
records/*) exec "$python" records/tools/rerun.py "$@" ;;
pack) exec "$python" data/pack.py "${@:2}" ;;
sample | evaluate | export | report | compare | ab)
    exec "$python" "records/tools/$1.py" "${@:2}" ;;
data) pack_torch_sources ;;
*)
    case "$gpus $*" in
    *" --preset"[=\ ]text* | *" --train_files"* | *" --help"* | *" -h"*) ;;  # no data of ours
    "0 "*) pack_torch_sources ;;
    *) "$python" data/fineweb.py ;;
    esac
    # given settings, it is the user's run; as it stands, the CPU record ends with a sample
    [ "$gpus $#" = "0 0" ] || launch "${SCRIPT:-train_gpt2.py}" "${settings[@]}" "$@"
    trap 'stopped=1; kill "$!" 2>/dev/null || :' TERM HUP USR1
    trap stopped=1 INT  # a terminal sends it to the training, too, which saves and ends
    launch "${SCRIPT:-train_gpt2.py}" "${settings[@]}" &
    training=$!
    wait "$training" && status=0 || status=$?
    while kill -0 "$training" 2>/dev/null; do  # a signal ended the waiting
        wait "$training" && status=0 || status=$?
    done
    [ "$status${stopped:-}" = 0 ] || exit "$status"
    echo '--- what it writes after "def " (more: bash run.sh sample)'
    "$python" records/tools/sample.py "def " ;;
esac
