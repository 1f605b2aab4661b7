#!/usr/bin/env bash
# bash run.sh [--name=value ...]     train the record for this machine. With GPUs, it is GPT-2 124M
#     on FineWeb (loss 3.2755 after 12.0 minutes on 8xH100, according to the public log). run.sh asks
#     before it downloads 5.6 GB, unless --yes is given. Without GPUs, it is a model of Python sources
#     with 0.5M parameters and an n-gram table (loss 1.2494, n=5, sd 0.0078, in 2 min on 2 cores).
# bash run.sh --preset=text          train on your own text, which `bash run.sh pack` prepares
# bash run.sh test [...]             run the test suite, or pytest with these arguments
# bash run.sh check [--name=value ...]     check that a run with these settings can start here
# bash run.sh profile [--name=value ...]   show where the time of a step goes
# bash run.sh TOOL [...]             run pack or a tool in records/tools: sample, evaluate, ...
# bash run.sh records/<date>_<Name>  train a record again and compare the loss with its runs' spread
# bash run.sh data                   only prepare the data of the CPU record
# The environment variables NPROC and PYTHON set the number of processes and the interpreter. data/ and logs/
# are relative to the current folder. .venv is beside run.sh, and `test` runs there.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "$0")" && pwd)
# Limit the spinning of waiting threads for the tools, too, as train_gpt2.py does for itself.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

trap 'echo "run.sh: stopped" >&2; exit 130' INT

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

[[ ${NPROC:-1} =~ ^[1-9][0-9]{0,3}$ ]] ||
    fail "NPROC=$NPROC must be a number of processes from 1 to 9999; unset it to start one per GPU"

tool=$root/records/tools/${1:-none}.py
grep -qs '^if __name__ == "__main__":' "$tool" || tool=  # the other files there are modules
case "${1:-}" in
"" | -* | test | check | profile | data | pack | records/* | [!-]*/records/*) ;;
*) [ -n "$tool" ] || fail "$1 is neither a setting (--name=value) nor a tool: \`head -15 '$0'\`" \
    "shows what there is" ;;
esac

# Use the packages of $PYTHON, or install them into .venv if one is missing.
python=${PYTHON:-python3}
case $python in
/*) ;;
*/*) python=$PWD/$python ;;
esac
requirements=requirements.txt
case "${1:-}" in
test) requirements+=" records/requirements.txt tests/requirements.txt" ;;
records/* | [!-]*/records/* | report | compare | ab | export | track) requirements+=" records/requirements.txt" ;;
esac
has_packages="from importlib.metadata import version
for name in '''$(cd "$root" && sed -n 's/^\([a-z_-]*\)[=>][^;]*$/\1/p' $requirements)'''.split():
    version(name)
assert tuple(map(int, version('torch').split('.')[:2])) >= (2, 5), 'torch is older than 2.5'"
if ! reason=$("$python" -c "$has_packages" 2>&1); then
    venv=$root/.venv
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    if ! "$venv/bin/python" -c "$has_packages" 2>/dev/null; then
        echo "$python: ${reason##*: }; installing ${requirements##* } into $venv"
        "$venv/bin/python" -m pip install -r "$root/${requirements##* }"
    fi
    python=$venv/bin/python
fi

count_gpus() {
    gpus=0
    case " $* " in
    *" --preset"[=\ ]"cpu "*) ;;  # the CPU record, even if there are GPUs
    *) gpus=$("$python" -c "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
import torch; print(torch.cuda.device_count())") ;;
    esac
}

# Replace the shell with NPROC processes of a script; the default is one per GPU, or one.
launch() {
    local processes=${NPROC:-$gpus} torchrun=
    [ "$gpus" -gt 0 ] || set -- "$1" --preset=cpu "${@:2}"
    [ "$processes" -le 1 ] ||
        torchrun="-m torch.distributed.run --standalone --nproc_per_node=$processes"
    exec "$python" $torchrun "$@"
}

# Succeed if data/torch_sources holds the CPU record's data: the manifest has the right sha256
# values, and shards.py confirms that the files match it.
has_record_data() {
    local manifest=data/torch_sources/manifest.json
    grep -qs 6251e20afb3501d08df7cac6eb197d149fdce9cd53acefd3475b4f8274d36140 $manifest &&
        grep -qs aaf4fab872ea22204bd4b9e49db61e4405d89aaf7b259734d36d0476f8a69aa7 $manifest &&
        "$python" "$root/data/shards.py" data/torch_sources >/dev/null
}

# Succeed if the settings name data that the user has prepared.
has_own_data() {
    case " $*" in
    *" --preset"[=\ ]text* | *" --train_files"*) ;;
    *) false ;;
    esac
}

pack_torch_sources() {
    local folder
    if ! has_record_data; then
        folder=$("$python" -c "import torch; print(*torch.__path__)")
        # version.py is the one file that differs between the CPU and the CUDA builds
        "$python" "$root/data/pack.py" "$folder" --pattern '*.py' --exclude version.py \
            --encoding bytes --val_fraction 0.02 --skip_bad --out data/torch_sources
    fi
    has_record_data ||
        echo "warning: data/torch_sources differs from the record's data (torch is not 2.13.0?)," \
            "so the loss is not comparable"
}

# Download FineWeb, asking first if training shards are missing. $1: the answer, if known.
fetch_fineweb() {
    local answer=$1
    if [ "$(ls data/fineweb10B/fineweb_train_*.bin 2>/dev/null | wc -l)" -lt 27 ]; then
        if [ -z "$answer" ] && [ -t 0 ]; then
            read -r -p "Download 5.6 GB of FineWeb into $PWD/data/fineweb10B? [y/N] " answer || :
        fi
        [[ $answer = [yY]* ]] || fail "5.6 GB of FineWeb were not downloaded: pass --yes to" \
            "download them, or --preset=text or --preset=cpu to train without FineWeb"
    fi
    "$python" "$root/data/fineweb.py" --out data/fineweb10B
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
*)
    [ -z "$tool" ] || exec "$python" "$tool" "${@:2}"
    answer=
    for argument; do  # removes --yes from the arguments
        shift
        if [ "$argument" = --yes ]; then answer=yes; else set -- "$@" "$argument"; fi
    done
    count_gpus "$@"
    case " $*" in
    *" --help"* | *" -h"*) launch "$root/train_gpt2.py" "$@" ;;
    esac
    if has_own_data "$@"; then
        echo "training on your own data; Ctrl-C saves a checkpoint and exits"
        manifest=data/mine/manifest.json
        case " $* " in
        *" --train_files"* | *" --n_layer"*) ;;
        *) [ ! -f $manifest ] || grep -q '"encoding": "bytes"' $manifest ||
            echo "note: data/mine is not in bytes, for which --preset=text was tuned; for other settings:" \
                "bash run.sh check --preset=text --minutes=15" ;;
        esac
    elif [ "$gpus" -eq 0 ]; then
        echo "training the CPU record; Ctrl-C saves a checkpoint and exits"
        pack_torch_sources
    else
        echo "training GPT-2 124M on FineWeb; Ctrl-C saves a checkpoint and exits"
        fetch_fineweb "$answer"
    fi
    [ "$gpus $#" = "0 0" ] || launch "$root/train_gpt2.py" "$@"
    # Without arguments, the CPU record ends with a sample, unless a signal stops the training.
    signals=0
    trap 'signals=$((signals + 1)); kill $! 2>/dev/null || :' TERM INT HUP USR1
    launch "$root/train_gpt2.py" &
    waits=none
    while [ "$waits" != "$signals" ]; do  # a signal interrupts wait
        waits=$signals
        status=0
        wait $! || status=$?
    done
    [ "$status$signals" = 00 ] || exit "$status"
    "$python" "$root/records/tools/sample.py" "def " ;;
esac
