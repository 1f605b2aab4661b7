#!/usr/bin/env bash
# bash tests/bench/gpu_report.sh DIR [PART ...]   what a CUDA machine should tell of this code
#
# Each call ends within LIMIT seconds (default 530). Calls that fit, most valuable first, and what each
# decides:
#   1  environment plan profile default nccl    does it train, how fast, is the plan right, does NCCL work
#   2  candidate                        is the candidate better than record 7 at equal tokens
#   3  plain muon resume                the step against a plain one; Muon; resumed to the bit or not
#   4  tests levers                     tests of CUDA alone; which lever to take. All take several calls;
#      LEVERS="coordinate descent,most kept,8 chunks,one product,flash attention,Muon compiled" first
#   5  run                              a curve to look at; 6  plain_run, its rival
# The compiler's cache stays in CACHE (default logs/gpu_cache) between calls. Without names: the parts of
# calls 1, 3 and 4. Each part writes its own text file into DIR at once, so whatever cuts it leaves the rest:
#   environment  the machine, its versions; what records/tools/check.py says of the default settings
#   plan         what records/tools/plan.py predicts for the default settings on an H200
#   profile      records/tools/step_profile.py: measured parts of a step and kernel classes, to set beside plan
#   default      40 steps of the default settings: cold start, then 15 steps with a warm cache
#   nccl         40 steps as the one process of a group with NCCL: collectives run, if with nobody
#   candidate    --preset=candidate against record7, of a smaller batch: PAIRS seeds (default 2) of SIDE_STEPS steps
#                (default 150) of 131,072 tokens a side
#   plain        their step against the plain one, in turn; memory at device_batch_size 64
#   muon         tests/bench/bench_muon.py
#   tests        pytest -m cuda
#   resume       killed, gone on: bit-identical?
#   levers       tests/bench/bench_step.py with LEVERS (names with commas between; default: all, in
#                the order of tests/bench/levers.py), as many as the time allows, a table for each;
#                COLD=True: cold and warm start too; LOSS_STEPS=200: validate after them
#   run          RUN_STEPS steps of the default settings (default 360), and a picture; alone, since
#                it needs the whole limit: take LIMIT over the step_avg of default_warm
#   plain_run    PLAIN_STEPS steps of the plain implementation, to compare with run at equal time
# DATA: folder with *train_*.bin and *val_*.bin, or .bin.xz; default data/fineweb10B. PYTHON:
# interpreter with torch and pytest. DEVICE=cpu tries the script itself with a tiny model.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: bash tests/bench/gpu_report.sh DIR [PART ...]}
shift
parts=" environment plan profile default nccl candidate plain muon tests resume levers run plain_run "
for part in "$@"; do
    [[ $parts == *" $part "* ]] || { echo "$part is no part: give some of$parts" >&2; exit 1; }
done
python=${PYTHON:-python3} device=${DEVICE:-cuda} end=$((SECONDS + ${LIMIT:-530}))
export PYTHONUNBUFFERED=1
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCHINDUCTOR_CACHE_DIR=${CACHE:-logs/gpu_cache}

"$python" - "${DATA:=data/fineweb10B}" "$work" <<'EOF'
import lzma, pathlib, sys
source, work = map(pathlib.Path, sys.argv[1:])
for path in sorted(source.resolve().glob("*.bin*")):
    if path.suffix == ".xz":
        (work / path.stem).write_bytes(lzma.open(path).read())
    else:
        (work / path.name).symlink_to(path)
EOF
[ -n "$(compgen -G "$work/*train_*.bin")" ] || { echo "no train_*.bin in $DATA" >&2; exit 1; }
data=(--train_files="$work/*train_*.bin" --val_files="$work/*val_*.bin" --allow_repeat=True
    --log_dir="$work/logs" --device="$device")
if [ "$device" = cpu ]; then # the same parts, small enough to be tried in minutes
    data+=(--n_layer=2 --n_head=2 --n_embd=64 --sequence_length=64 --batch_size=16
        --device_batch_size=8 --val_tokens=4096)
    default=("${data[@]}") small=("${data[@]}") side=() many=6 few=3 rounds=2
    RUN_STEPS=${RUN_STEPS:-40} PLAIN_STEPS=${PLAIN_STEPS:-20}
else
    default=("${data[@]}" --val_tokens=1048576)
    small=("${data[@]}" --batch_size=64 --device_batch_size=64 --n_layer=12 --n_head=6
        --n_embd=768 --sequence_length=1024 --val_tokens=1048576)
    side=(--batch_size=128) many=40 few=15 rounds=5
fi

# run_part NAME command ...: into DIR/NAME.txt, ended when the time is over
run_part() {
    local left=$((end - SECONDS))
    [ "$left" -gt 5 ] || { echo "$1: no time left"; return; }
    echo "== $1 (of $left s left)"
    timeout --signal=INT --kill-after=10 "$left" "${@:2}" 2>&1 | sed -u "s#$work/##g" >"$out/$1.txt"
    echo "== $1: exit ${PIPESTATUS[0]} after $((SECONDS))s"
    tail -n 4 "$out/$1.txt"
}

environment() {
    run_part environment bash -c "nvidia-smi; '$python' -c 'import torch; print(torch.__version__,
torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_properties(0),
torch.backends.cudnn.version())'; lscpu | head -20; git log -1 --format=%H 2>/dev/null"
    run_part check "$python" records/tools/check.py "${default[@]}"
}
plan() { run_part plan "$python" records/tools/plan.py --device=H200; }
profile() { run_part profile "$python" records/tools/step_profile.py "${default[@]}"; }
default() {
    TORCHINDUCTOR_CACHE_DIR=$work/cold run_part default_cold "$python" train_gpt2.py "${default[@]}" --num_iterations="$many" \
        --val_loss_every=0 --run_id=cold
    run_part default_warm "$python" train_gpt2.py "${default[@]}" --num_iterations="$few" \
        --val_loss_every=0 --run_id=warm
    cp "$work"/logs/{cold,warm}.txt "$out" 2>/dev/null
}
nccl() {
    MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-29511} RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
        run_part nccl "$python" train_gpt2.py "${small[@]}" --num_iterations="$many" \
        --val_loss_every=0 --run_id=nccl
}
candidate() {
    local seed name steps=${SIDE_STEPS:-150}
    [ "$device" = cuda ] || steps=$many
    for seed in $(seq 1 "${PAIRS:-2}"); do
        for name in record7 candidate; do
            run_part "${name}_seed$seed" "$python" train_gpt2.py --preset="$name" "${small[@]}" \
                "${side[@]}" --num_iterations="$steps" --warmdown_iters="$((steps * 3 / 10))" --seed="$seed" \
                --val_loss_every="$((steps / 3))" --run_id="${name}_seed$seed"
            cp "$work/logs/${name}_seed$seed.txt" "$out/${name}_seed${seed}_log.txt" 2>/dev/null
        done
    done
    run_part candidate "$python" records/tools/report.py "$out"/*_seed*_log.txt
}
plain() {
    if [ "$device" = cpu ]; then local full=(); else local full=(--batch_size=512); fi
    run_part plain "$python" tests/bench/bench_step.py plain "${small[@]}" "${full[@]}" \
        --rounds=5 --steps=1 --cold=False
}
muon() {
    if [ "$device" = cpu ]; then local less=(--only="4 layers x 128" --rounds=2); else local less=(); fi
    run_part muon "$python" tests/bench/bench_muon.py "${less[@]}"
}
tests() { run_part tests "$python" -m pytest -v -m cuda tests/test_cuda.py \
    --cuda_tests_on="$device" -p no:cacheprovider; }
resume() {
    [ $((end - SECONDS)) -gt 60 ] || { echo "resume: no time left"; return; }
    local settings=("${small[@]}" --num_iterations="$few" --val_loss_every=0 --save_every="$few"
        --run_id=whole)
    run_part resume_whole "$python" train_gpt2.py "${settings[@]}"
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
whole, cut = (torch.load('$work/logs/%s/state_step%010d.pt' % (name, $few), weights_only=True)['model']
              for name in ('whole', 'cut'))
worst = max((whole[name] - cut[name]).abs().max().item() for name in whole)
print('killed after a checkpoint and gone on: greatest difference of a weight', worst)"
}
levers() {
    local names
    IFS=, read -ra names <<<"${LEVERS:-all}"
    run_part levers "$python" tests/bench/bench_step.py "${names[@]}" "${small[@]}" \
        --rounds="$rounds" --steps=4 --together=2 --cold="${COLD:-False}" \
        --loss_steps="${LOSS_STEPS:-0}"
    [ -n "${LEVERS:-}" ] || run_part levers_128 "$python" tests/bench/bench_step.py "micro-batch / 2" \
        "${small[@]}" --batch_size=128 --device_batch_size=128 --rounds="$rounds" --steps=4
}
run() {
    run_part run "$python" train_gpt2.py "${default[@]}" --num_iterations="${RUN_STEPS:-360}" \
        --warmdown_iters="$((${RUN_STEPS:-360} * 3 / 10))" --val_loss_every=40 --run_id=run
    cp "$work/logs/run.txt" "$out/run_log.txt"
    run_part picture "$python" records/tools/report.py "$out/run_log.txt" --picture="$out/run.png"
}
plain_run() {
    run_part plain_run "$python" tests/bench/plain_run.py "${default[@]}" \
        --num_iterations="${PLAIN_STEPS:-160}" --warmdown_iters="$((${PLAIN_STEPS:-160} * 3 / 10))" \
        --val_loss_every=40 --run_id=plain_run
    cp "$work/logs/plain_run.txt" "$out/plain_run_log.txt"
}

for part in ${*:-environment plan profile default nccl plain muon resume tests levers}; do
    "$part"
done
