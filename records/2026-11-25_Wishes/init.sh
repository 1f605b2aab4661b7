#!/usr/bin/env bash
# bash records/2026-11-25_Wishes/init.sh: continue a trained model on its own text by --init.
# Needs tiny Shakespeare in data/mine. Trains for 268 steps, the rule's for 3 minutes on one core,
# then starts from the result with all rates times 1, 0.3 and 0.1, with and without the n-gram table.
set -euo pipefail
export OMP_NUM_THREADS=1
train() {
    python train_gpt2.py --preset=text --n_layer=2 --ngram_dropout=0.3 --val_tokens=32768 --save_every=0 \
        --log_dir=logs/init "$@" | grep val_loss
}
rates() { # FACTOR N-GRAM_RATE
    python -c "
rates = dict(muon=.0024, embedding=.17, scalar=.028)
print(f'--learning_rate={.0087 * $1:.3g} --ngram_learning_rate={$2}')
print(*(f'--{name}_learning_rate={rate * $1:.3g}' for name, rate in rates.items()))"
}
train --run_id=base --num_iterations=268 --warmdown_iters=214 --muon_momentum_warmup=40 --val_loss_every=0 $(rates 1 .11)
for pair in "1 .11" "0.3 .033" "0.1 .011" "0.3 0" "0.1 0"; do
    echo "rates times and rate of the n-gram table: $pair"
    train --run_id="init_${pair// /_}" --init=logs/init/base/model.pt --num_iterations=40 --warmdown_iters=32 \
        --muon_momentum_warmup=0 --val_loss_every=10 $(rates $pair)
done
