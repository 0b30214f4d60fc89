#!/bin/sh
# One machine: launch/one_node.sh CONFIG [flags of the run]
#   GPUS: ranks on it; default: 8
# CONFIG is a launch file, or the name of one in configs/launch/. Started from any folder.
set -eu
config=${1:?"usage: $0 CONFIG [flags]"}
shift
# Megatron's tensor parallelism counts on one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec python -m megatron_rc.launch --nproc-per-node "${GPUS:-8}" --config "$config" "$@"
