#!/usr/bin/env bash
# bash records/2026-11-25_Wishes/wishes.sh TEXT: carry out the 34 wishes in an empty folder, with small settings, and print each command,
# the end of its output, and whether it was met: the exit status is as expected, and the output contains a pattern.
# TEXT: tiny Shakespeare. PYTHON and TIKTOKEN_CACHE_DIR as for run.sh.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
text=$(realpath "$1")
folder=$(mktemp -d)
cd "$folder"
export PYTHON=${PYTHON:-python3} PATH=$(dirname "$(command -v "${PYTHON:-python3}")"):$PATH
export S="--preset=text --num_iterations=16 --warmdown_iters=8 --val_loss_every=8 --val_tokens=2048 --save_every=8 --n_layer=2
    --ngram_rows=16384 --batch_size=4 --compile=False"
cp "$text" input.txt
cp "$root/train_gpt2.py" .
met=0 number=0

# wish NAME PATTERN COMMAND [STATUS]: the command is run by bash
wish() {
    number=$((number + 1))
    echo
    echo "== $number. $1"
    echo "\$ $3"
    status=0
    bash -c "$3" >out.txt 2>&1 || status=$?
    tail -n 4 out.txt | cut -c 1-160
    if [ "$status" = "${4:-0}" ] && grep -qE -- "$2" out.txt; then
        echo "-> met" && met=$((met + 1))
    else
        echo "-> NOT MET (status $status, looked for $2)"
    fi
}
run="bash $root/run.sh"
python="$(basename "$PYTHON")"

# Students
wish "bare run" '^def ' "$run --yes"
wish "own text to a model that writes" 'ROMEO' \
    "$run pack input.txt --out data/mine && $run \$S --run_id=mine && $run sample ROMEO: --weights logs/mine --tokens=50"
wish "progress always visible" 'step:16/16 val_loss' "$run \$S --run_id=visible"
wish "Ctrl-C and go on" 'continuing after step [1-9]' \
    "timeout -s INT 12 $run \$S --num_iterations=2000 --run_id=stop; $run \$S --num_iterations=2000 --run_id=stop --resume=auto & sleep 15; kill -INT %1; wait; cat logs/stop.txt | grep resume="
wish "picture of the loss" 'mine.png' "$run report logs/mine.txt --picture mine.png && ls mine.png"
wish "other prompts, temperature, length" 'JULIET' "$run sample JULIET: --weights logs/mine --temperature=0.5 --tokens=20 --seed=3"
wish "a night's model" 'num_iterations=[0-9]+' "$run check --preset=text --minutes=480 --compile=False"
wish "two runs in one picture" 'both.png' "$run report logs/mine.txt logs/visible.txt --picture both.png && ls both.png"
wish "understand Muon" 'def orthogonalize' "grep -A 16 'def orthogonalize' $root/README.md"
wish "honest words for MacBook and T4" 'not yet tried' "grep -E 'MacBook|T4' $root/README.md"

# Researchers
diffs=$(mktemp -d)
"$PYTHON" - "$root" "$diffs" <<'P'
import re, sys
for name, diff in zip(["softcap", "values", "window", "optimizer"], re.findall(r"```diff\n(.*?)```", open(f"{sys.argv[1]}/records/README.md").read(), re.S)):
    open(f"{sys.argv[2]}/{name}.diff", "w").write(diff)
P
edit() { echo "cp $root/train_gpt2.py $1.py && sed 's/train_gpt2/$1/' $diffs/$1.diff | patch -s -F 3 $1.py && $python $1.py \$S --model=gpt2 --value_embeddings=0 --max_ngram=0 --ngram_rows=262144 --ngram_dropout=0 --key_shift=0 --run_id=$1"; }
wish "value embeddings" '^result' "$(edit values)"
wish "cosine schedule" '^result' \
    "sed 's/lr_scale=args.final_lr + (1 - args.final_lr) \* remaining/lr_scale=0.5 + 0.5 * math.cos(math.pi * (1 - remaining))/' train_gpt2.py >cosine.py && ! diff -q train_gpt2.py cosine.py && $python cosine.py \$S --run_id=cosine"
wish "own optimizer" '^NAdam|^result' "$(edit optimizer)"
wish "own setting" 'hyperparameter my_setting=2.0' \
    "sed 's/^    seed: int = setting/    my_setting: float = 1.0\n&/' train_gpt2.py >mysetting.py && $python mysetting.py \$S --my_setting=2 --run_id=my && cat logs/my.txt"
wish "sliding window" '^result' "$(edit window)"
wish "three seeds and a mean" 'mean' \
    "for seed in 1 2 3; do $run \$S --seed=\$seed --run_id=base_seed\$seed; done; $python $root/records/tools/compare.py 'logs/base_seed*.txt'"
wish "ablation with statistics" 'p ' \
    "$run ab \"python train_gpt2.py \$(echo \$S)\" --arm 'eager: --max_ngram=3' --rounds 2 --out logs/ab"
wish "profile" 'ms' "$run profile \$S"
wish "TensorBoard" 'events' "$run track logs/mine.txt --tensorboard board; find board"
wish "evaluate another text" 'bits per byte|bits/byte' "head -c 20000 input.txt >other.txt; $run evaluate other.txt --weights logs/mine"
wish "export" 'config.json' "$run export --weights logs/mine --out hub && ls hub"
wish "--init" 'starting from the weights' "$run \$S --run_id=more --init=logs/mine/model.pt"
wish "speed levers" 'In this order' "grep -A 3 '^### If it is slow' $root/README.md"

# Engineers
wish "copy Muon (1 and 2 ranks)" 'passed' "cd $root && $python -m pytest -q tests/test_file.py tests/test_muon.py -k 'copied or copy or alone'"
wish "two processes, same loss" '^equal' \
    "NPROC=2 $run \$S --dtype=float32 --run_id=two && $run \$S --dtype=float32 --run_id=one && [ \"\$(grep ^result logs/one.txt)\" = \"\$(grep ^result logs/two.txt)\" ] && echo equal"
wish "plan on other GPUs" 'B200' "$python $root/records/tools/plan.py --help"
wish "GPT-2's tokens on own text" 'num_iterations' \
    "$run pack input.txt --encoding gpt2 --out data/mine2 && $run check --preset=text --minutes=3 --compile=False --train_files='data/mine2/train_*.bin' --val_files='data/mine2/val_*.bin'"
wish "resume on other processes" 'continuing after step 8' \
    "$run \$S --run_id=part; rm logs/part/model.pt logs/part/*16.pt; NPROC=2 $run \$S --run_id=part --resume=auto"
wish "memory and time of an edit predicted" 'peak memory' "$run check \$S --n_layer=4"
wish "rerun a record" 'interval' "$run $root/records/2026-11-25_Modern_Model cpu/seed1"
wish "Slurm and nodes" 'requeue' "cat $root/records/2026-11-25_Slurm/train.sbatch"
wish "unicode prompt" 'Ünï' "$run sample 'Ünï日' --weights logs/mine --tokens=5"
wish "one test file" 'passed' "$run test tests/test_track.py"
wish "find schedule, order of data and validation from the top" 'def schedule' "grep -nE '^(# ----|def (schedule|train|validate|shuffled_starts))' train_gpt2.py"

echo
echo "$met of $number met"
