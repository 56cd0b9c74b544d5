#!/bin/sh
# The whole job with ewc-ft, in a folder of its own: train, consolidate, look, adapt, try other lambdas, report.
#
#     sh examples/command_line.sh [FOLDER]
set -eu
mkdir -p "${1:-command-line}"
cd "${1:-command-line}"

ewc-ft finetune --model 'mlp?hidden=64' --data digits --epochs 40 --lr 1e-3 --output model.pt --overwrite
ewc-ft consolidate model.pt --data digits --output model.anchor.safetensors --overwrite
ewc-ft inspect model.anchor.safetensors
ewc-ft finetune --anchors model.anchor.safetensors --data 'digits?rotate=90' --epochs 10 --lr 1e-3 \
    --eval digits --eval 'digits?rotate=90' --output adapted.pt --overwrite
ewc-ft evaluate adapted.pt --data digits --data 'digits?rotate=90'
ewc-ft sweep --anchors model.anchor.safetensors --data 'digits?rotate=90' --epochs 10 --lr 1e-3 \
    --eval digits --eval 'digits?rotate=90' --lambda 1..1000:3 --output sweep --overwrite
ewc-ft report sweep
