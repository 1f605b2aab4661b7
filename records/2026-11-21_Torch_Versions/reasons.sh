#!/usr/bin/env bash
# bash records/2026-11-21_Torch_Versions/reasons.sh PYTHON...
# For each interpreter: resident MiB after `import torch`; calls of the C++
# compiler, and seconds in them, in one cold start of the CPU record.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/cxx" <<'CXX'
#!/usr/bin/env bash
start=$EPOCHREALTIME
status=0
g++ "$@" || status=$?
echo "$start $EPOCHREALTIME" >> "$CALLS"
exit $status
CXX
chmod +x "$folder/cxx"
for python in "$@"; do
    "$python" -c "
import resource, torch
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(f'torch {torch.__version__}: {resident} MiB after import torch')"
    rm -f "$folder/calls"
    mkdir -p "$folder/tmp"
    TMPDIR=$folder/tmp PYTHON=$python CXX=$folder/cxx CALLS=$folder/calls TORCHINDUCTOR_CACHE_DIR=$(mktemp -d "$folder/XXXX") \
        bash run.sh --num_iterations=3 --warmdown_iters=1 --val_loss_every=0 --val_tokens=4096 \
        --log_dir="$folder" --run_id="$(basename "$(mktemp -u "$folder/XXXX")")" | grep '^setup:'
    awk '{n++; s += $2 - $1} END {printf "C++ compiler: %d calls, %.1f s in them\n", n, s}' "$folder/calls"
done
