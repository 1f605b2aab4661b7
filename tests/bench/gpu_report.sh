#!/usr/bin/env bash
# bash tests/bench/gpu_report.sh DIR [PART ...]   collect measurements that need a CUDA GPU
#
# Each part streams its output to a file in DIR. A call ends within LIMIT seconds (default 530),
# so spread the parts over several calls, numbered below, the most valuable first:
#   1  environment   the machine and the versions
#      plan          prediction of records/tools/plan.py for the default settings on an H200
#      profile       measured parts of a step (records/tools/step_profile.py)
#      default       40 steps of the default settings: cold start, then 15 steps with a warm cache
#   2  modern        MODERN_STEPS steps of --preset=modern (default 400, about 105M tokens), then as
#                    many tokens of the default settings
#   3  plain         a step against the plain implementation; memory at device_batch_size 64
#      muon          tests/bench/bench_muon.py
#      resume        killed and resumed: bit-identical?
#   4  tests         pytest -m cuda
#      levers        a step of train_gpt2.py against copies that differ in one option. A call has time
#                    for a few: ONLY="combo_kernels eight_chunks" chooses from LEVERS below
#   5  run           RUN_STEPS steps of the default settings (default 360) and a picture. It needs the
#                    whole limit: set RUN_STEPS to LIMIT / step_avg of default_warm
# Without PART: the parts of calls 1, 3 and 4. DATA: folder with *train_*.bin and *val_*.bin, or
# .bin.xz (default data/fineweb10B). CACHE: compiler cache, kept between calls (default
# logs/gpu_cache). PYTHON: interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: bash tests/bench/gpu_report.sh DIR [PART ...]}
shift
parts=" environment plan profile default modern plain muon tests resume levers run "
for part in "$@"; do
    [[ $parts == *" $part "* ]] || { echo "$part is not a part: give some of$parts" >&2; exit 1; }
done
python=${PYTHON:-python3} end=$((SECONDS + ${LIMIT:-530}))
export PYTHONUNBUFFERED=1
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCHINDUCTOR_CACHE_DIR=${CACHE:-logs/gpu_cache}

for path in "$(realpath "${DATA:-data/fineweb10B}")"/*.bin*; do
    case $path in
    *.xz) "$python" -c "import lzma, sys; sys.stdout.buffer.write(lzma.open('$path').read())" \
        >"$work/$(basename "$path" .xz)" ;;
    *) ln -s "$path" "$work" ;;
    esac
done
[ -n "$(compgen -G "$work/*train_*.bin")" ] || { echo "DATA has no train_*.bin" >&2; exit 1; }
data=(--train_files="$work/*train_*.bin" --val_files="$work/*val_*.bin" --allow_repeat=True
    --log_dir="$work/logs" --device=cuda)
default=("${data[@]}" --val_tokens=1048576)
small=("${default[@]}" --batch_size=64)
gpt2_124m=(--n_layer=12 --n_head=6 --n_embd=768 --sequence_length=1024 --device_batch_size=64)

# run_part NAME COMMAND ...: run a command with its output in DIR/NAME.txt until the time runs out
run_part() {
    local left=$((end - SECONDS))
    [ "$left" -gt 5 ] || { echo "$1: no time left"; return; }
    echo "== $1 (of $left s left)"
    timeout --signal=INT --kill-after=10 "$left" "${@:2}" 2>&1 | sed -u "s#$work/##g" >"$out/$1.txt"
    echo "== $1: exit ${PIPESTATUS[0]} after ${SECONDS}s"
    tail -n 4 "$out/$1.txt"
}

# train NAME SCRIPT STEPS --field=value ...: a run with its log in DIR/NAME_log.txt
train() {
    run_part "$1" "$python" "$2" "${@:4}" --num_iterations="$3" --warmdown_fraction=0.3 --run_id="$1"
    cp "$work/logs/$1.txt" "$out/$1_log.txt" 2>/dev/null
}

environment() {
    run_part environment bash -c "nvidia-smi; '$python' -c 'import torch; print(torch.__version__,
torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_properties(0),
torch.backends.cudnn.version())'; lscpu | head -20; git log -1 --format=%H 2>/dev/null"
}
plan() { run_part plan "$python" records/tools/plan.py --device=H200; }
profile() {
    run_part profile "$python" records/tools/step_profile.py "${default[@]}"
    cp "$work"/logs/profile_*/*.json.gz "$out/trace.json.gz"
}
default() {
    TORCHINDUCTOR_CACHE_DIR=$work/cold train default_cold train_gpt2.py 40 "${default[@]}" \
        --val_loss_every=0
    train default_warm train_gpt2.py 15 "${default[@]}" --val_loss_every=0
}
modern() {
    local steps=${MODERN_STEPS:-400}
    train modern train_gpt2.py "$steps" --preset=modern "${data[@]}" \
        --val_tokens=983040 --val_loss_every=$((steps / 4))
    # A step of the default settings has twice as many tokens.
    train record7 train_gpt2.py $((steps / 2)) "${default[@]}" --val_loss_every=$((steps / 4))
}
plain() {
    run_part plain "$python" tests/bench/bench_step.py plain "${default[@]}" --rounds=5 --steps=1 \
        "${gpt2_124m[@]}" --batch_size=512
}
muon() { run_part muon "$python" tests/bench/bench_muon.py; }
tests() { run_part tests "$python" -m pytest -v -m cuda tests/test_cuda.py -p no:cacheprovider; }
resume() {
    local settings=("${small[@]}" --num_iterations=15 --val_loss_every=0)
    run_part resume_whole "$python" train_gpt2.py "${settings[@]}" --run_id=whole
    settings+=(--run_id=cut --save_every=3 --keep_checkpoints=1)
    "$python" train_gpt2.py "${settings[@]}" >"$work/cut.txt" 2>&1 &
    while [ "$SECONDS" -lt "$end" ] && kill -0 $! 2>/dev/null; do
        compgen -G "$work/logs/cut/state_step*.pt" >"$work/seen" && break
        sleep 0.05
    done
    kill -KILL $! 2>/dev/null
    run_part resume_cut "$python" train_gpt2.py "${settings[@]}" --resume=auto
    run_part resume "$python" -c "
import torch
whole, cut = (torch.load(f'$work/logs/{run}/model.pt')['model'] for run in ('whole', 'cut'))
largest = max((whole[name] - cut[name]).abs().max().item() for name in whole)
print('killed after a checkpoint and resumed: largest difference of a weight', largest)"
}
# Each lever is a name and a sed command that makes the edited copy of train_gpt2.py.
option() { echo "s/^    torch.sparse.check.*/&\n    from torch._inductor import config\n    from torch._functorch import config as functorch_config\n    $1/"; }
attention() {
    echo "s/^        y = F.scaled.*/        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.$1]):\n    &/"
}
LEVERS=(
    "coordinate_descent=$(option config.coordinate_descent_tuning=True)"
    "combo_kernels=$(option config.combo_kernels=True)"
    "recompute_some=$(option functorch_config.activation_memory_budget=0.7)"
    "eight_chunks=s/max_chunks = 2 if/max_chunks = 8 if/"
    "cudnn_attention=$(attention CUDNN_ATTENTION)"
    "flash_attention=$(attention FLASH_ATTENTION)"
    "max_autotune=s/model.compile(/&mode='max-autotune-no-cudagraphs', /"
    "cuda_graphs=s/model.compile(/&mode='reduce-overhead', /"
    "expandable_segments=s/^import numpy.*/os.environ['PYTORCH_ALLOC_CONF']='expandable_segments:True'\n&/"
)
levers() {
    local lever copies=()
    for lever in "${LEVERS[@]}"; do
        [[ " ${ONLY:-${lever%%=*}} " == *" ${lever%%=*} "* ]] || continue
        copies+=("$work/${lever%%=*}.py")
        sed "${lever#*=}" train_gpt2.py >"${copies[-1]}"
        ! cmp -s train_gpt2.py "${copies[-1]}" || { echo "${lever%%=*} changes nothing" >&2; exit 1; }
    done
    run_part levers "$python" tests/bench/bench_step.py "${copies[@]}" "${small[@]}" \
        "${gpt2_124m[@]}" --rounds=5 --steps=4
}
run() {
    train run train_gpt2.py "${RUN_STEPS:-360}" "${default[@]}" --val_loss_every=40
    run_part picture "$python" records/tools/report.py "$out/run_log.txt" --picture="$out/run.png"
}

for part in ${*:-environment plan profile default plain muon resume tests levers}; do
    "$part"
done
