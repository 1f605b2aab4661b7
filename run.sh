#!/usr/bin/env bash
# bash run.sh [--field=value ...]       reproduce the record of the machine it stands on
#     with GPUs: GPT-2 124M on FineWeb; train_gpt2.py's defaults, whose public log says loss 3.2755
#                and 12.0 minutes on 8xH100
#     without:   0.8M parameters on the bytes of PyTorch's own Python sources: loss 1.2935 (n=5, sd
#                0.0084), 5 minutes on 2 cores with installation (11 on a CPU without bf16), 0.6 GB
# bash run.sh test [pytest arguments]   run the test suite
# NPROC=n sets the number of processes, PYTHON=... the interpreter, SCRIPT=... a copy of the script.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
script=${SCRIPT:-train_gpt2.py}
export PYTHONPATH="$PWD/data:$PWD/records${PYTHONPATH:+:$PYTHONPATH}"  # for a copy elsewhere
check="import torch, numpy, tiktoken, huggingface_hub, tqdm
assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 5), 'torch is older than 2.5'"
requirements=requirements.txt
if [ "${1:-}" = test ]; then
    check+="; import pytest, hypothesis"
    requirements=tests/requirements.txt
fi
if ! reason=$("$python" -c "$check" 2>&1); then
    echo "$python: ${reason##*$'\n'}; using .venv"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    python=.venv/bin/python
    "$python" -c "$check" 2>/dev/null || "$python" -m pip install -r "$requirements"
fi

if [ "${1:-}" = test ]; then
    exec "$python" -m pytest "${@:2}"
fi

gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -gt 0 ]; then
    processes=${NPROC:-$gpus}
    settings=()
    "$python" data/fineweb.py
else
    processes=${NPROC:-1}
    data=data/torch_sources
    torch_folder=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
    # version.py is the one file that differs between the CPU and the CUDA builds
    "$python" data/pack.py "$torch_folder" --pattern '*.py' --exclude version.py \
        --encoding bytes --val_fraction 0.02 --skip_bad --out "$data"
    if grep -q '"data_hash": "ac53c68016e8d8a7"' "$data/manifest.json"; then
        echo "data: the record's own (torch 2.13.0)"
    else
        echo "data: not the record's (another torch than 2.13.0?); the loss is not comparable"
    fi
    settings=(
        --train_files="$data/train_*.bin" --val_files="$data/val_*.bin"
        --vocab_size=257 --n_layer=4 --n_head=1 --n_embd=128
        --batch_size=16 --device_batch_size=16 --sequence_length=256
        --num_iterations=1800 --warmdown_iters=900
        --learning_rate=0.01 --muon_learning_rate=0.0005
        --val_loss_every=450 --val_tokens=420864 --bytes_per_token=0.99991
        --target_val_loss=1.32 --device=cpu
    )
fi
if [ "$processes" -gt 1 ]; then
    exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" \
        "$script" "${settings[@]}" "$@"
fi
exec "$python" "$script" "${settings[@]}" "$@"
