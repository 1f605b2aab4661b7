#!/usr/bin/env bash
# bash records/2026-11-25_Wishes/wishes.sh TEXT: run the 34 wishes in a temporary folder on a CPU, most with small settings, and print each
# command and the end of its output. A wish is met if its command succeeds and its output matches a pattern. Six are only looked up in
# the documentation. TEXT: tiny Shakespeare. PYTHON and TIKTOKEN_CACHE_DIR as for run.sh. No path may contain a space.
set -uo pipefail
[ -f "${1:-}" ] || { echo "usage: wishes.sh TEXT" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
text=$(realpath "$1")
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
export PYTHON=$python PATH=$(dirname "$python"):$PATH CUDA_VISIBLE_DEVICES=
export S="--preset=text --num_iterations=16 --warmdown_iters=8 --val_loss_every=8 --val_tokens=2048 --save_every=8 --n_layer=2
    --ngram_rows=16384 --batch_size=4 --compile=False"
cp "$text" input.txt
cp "$root/train_gpt2.py" .
met=0 number=0
run="bash $root/run.sh"

# wish NAME PATTERN COMMAND: bash runs the command
wish() {
    number=$((number + 1))
    echo
    echo "== $number. $1"
    echo "\$ $3"
    status=0
    bash -c "$3" >out.txt 2>&1 || status=$?
    tail -n 4 out.txt | cut -c 1-160
    if [ "$status" = 0 ] && grep -qE -- "$2" out.txt; then
        echo "-> met" && met=$((met + 1))
    else
        echo "-> NOT MET (status $status, looked for $2)"
    fi
}

# Students
wish "bare run" '^def ' "$run --yes"
wish "own text to a model that writes" 'ROMEO' \
    "$run pack input.txt --out data/mine && $run \$S --run_id=mine && $run sample ROMEO: --weights logs/mine --tokens=50"
wish "progress always visible" 'step:16/16 val_loss' "$run \$S --run_id=visible"
wish "Ctrl-C and go on" 'stopped by a signal after step [1-9][0-9]' \
    "for attempt in 1 2; do timeout -s INT 20 $run \$S --num_iterations=5000 --run_id=stop --resume=auto; done; cat logs/stop.txt | grep -E 'continuing after step [1-9]|stopped by'"
wish "picture of the loss" 'mine.png' "$run report logs/mine.txt --picture mine.png && ls mine.png"
wish "other prompts, temperature, length" 'JULIET' "$run sample JULIET: --weights logs/mine --temperature=0.5 --tokens=20 --seed=3"
wish "a night's model" 'num_iterations=[0-9]+' "$run check --preset=text --minutes=480 --compile=False"
wish "two runs in one picture" 'both.png' "$run report logs/mine.txt logs/visible.txt --picture both.png && ls both.png"
wish "understand Muon" 'def orthogonalize' "grep -A 16 'def orthogonalize' $root/README.md"
wish "honest words for MacBook and T4" 'not yet tried' "grep -E 'MacBook|T4' $root/README.md"

# Researchers
"$python" - "$root" "$folder" <<'P'
import re, shutil, sys
from pathlib import Path

root, folder = map(Path, sys.argv[1:])
sys.path.insert(0, str(root / "records" / "tools"))
import ab

diffs = re.findall(r"```diff\n(.*?)```", (root / "records" / "README.md").read_text(), re.S)
for name, diff in zip(["softcap", "values", "window", "optimizer"], diffs):
    (folder / "idea.diff").write_text(diff)
    shutil.copy(ab.patched(root / "train_gpt2.py", folder / "idea.diff", folder), folder / f"{name}.py")
P
edited() { echo "$python $1.py \$S --model=gpt2 --value_embeddings=0 --max_ngram=0 --ngram_rows=262144 --ngram_dropout=0 --key_shift=0 --run_id=$1"; }
wish "value embeddings" '^result' "$(edited values)"
wish "cosine schedule" '^result' \
    "sed 's/lr_scale=args.final_lr + (1 - args.final_lr) \* remaining/lr_scale=0.5 + 0.5 * math.cos(math.pi * (1 - remaining))/' train_gpt2.py >cosine.py && ! diff -q train_gpt2.py cosine.py && $python cosine.py \$S --run_id=cosine"
wish "own optimizer" '^NAdam parameters' "$(edited optimizer)"
wish "own setting" 'hyperparameter my_setting=2.0' \
    "sed 's/^    seed: int = setting/    my_setting: float = 1.0\n&/' train_gpt2.py >mysetting.py && $python mysetting.py \$S --my_setting=2 --run_id=my && cat logs/my.txt"
wish "sliding window" '^result' "$(edited window)"
wish "three seeds and a mean" 'base . 3 . 16 . [0-9.]+ .sd' \
    "for seed in 1 2 3; do $run \$S --seed=\$seed --run_id=base_seed\$seed; done; $run report 'base=logs/base_seed*.txt' --summary"
wish "ablation with statistics" '\| eager .*[0-9]' \
    "$run ab \"python train_gpt2.py \$(echo \$S)\" --arm 'eager: --max_ngram=3' --rounds 2 --out logs/ab"
wish "profile" '[0-9] ms' "$run profile \$S"
wish "TensorBoard" 'events' "$run track logs/mine.txt --tensorboard board; find board"
wish "evaluate another text" 'bits per byte|bits/byte' "head -c 20000 input.txt >other.txt; $run evaluate other.txt --weights logs/mine"
wish "export" 'config.json' "$run export --weights logs/mine --out hub && ls hub"
wish "--init" 'starting from the weights' "$run \$S --run_id=more --init=logs/mine/model.pt"
wish "speed levers" 'In this order' "grep -A 3 '^### If it is slow' $root/README.md"

# Engineers
wish "copy Muon (1 and 2 ranks)" 'passed' "cd $root && $python -m pytest -q tests/test_file.py tests/test_muon.py -k 'copied or copy or alone'"
wish "two processes, same loss" '^equal' \
    "NPROC=2 $run \$S --dtype=float32 --run_id=two && $run \$S --dtype=float32 --run_id=one && grep -h ^result logs/one.txt logs/two.txt | cut -c 1-21 | uniq -c | sed 's/^ *2 /equal to three decimals: /'"
wish "plan on other GPUs" 'B200' "$python $root/records/tools/plan.py --help"
wish "GPT-2's tokens on own text" 'num_iterations' \
    "$run pack input.txt --encoding gpt2 --out data/mine2 && $run check --preset=text --minutes=3 --compile=False --train_files='data/mine2/train_*.bin' --val_files='data/mine2/val_*.bin'"
wish "resume on other processes" 'continuing after step 8' \
    "$run \$S --run_id=part --keep_checkpoints=3; rm logs/part/model.pt logs/part/*16.pt; NPROC=2 $run \$S --run_id=part --resume=auto"
wish "memory and time of an edit predicted" 'peak memory' "$run check \$S --n_layer=4"
wish "rerun a record" 'interval' "$run $root/records/2026-11-25_Modern_Model cpu/seed1"
wish "Slurm and nodes" 'requeue' "cat $root/records/2026-11-25_Slurm/train.sbatch"
wish "unicode prompt" 'Ünï' "$run sample 'Ünï日' --weights logs/mine --tokens=5"
wish "one test file" 'passed' "$run test tests/test_track.py"
wish "find schedule, order of data and validation from the top" 'def schedule' "grep -nE '^(# ----|def (schedule|train|validate|shuffled_starts))' train_gpt2.py"

echo
echo "$met of $number met"
[ "$met" = "$number" ]
