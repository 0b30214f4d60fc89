#!/bin/sh
# Several machines: on each of them, launch/several_nodes.sh CONFIG [flags of the run], with
#   NODES: number of machines
#   NODE_RANK: number of this one, from 0
#   MASTER: address of machine 0, as the others reach it
#   GPUS: ranks on each; default: 8
#   PORT: free port of machine 0; default: 29500
set -eu
config=${1:?"usage: NODES=N NODE_RANK=R MASTER=HOST $0 CONFIG [flags]"}
shift
nodes=${NODES:?"NODES is missing: the number of machines"}
rank=${NODE_RANK:?"NODE_RANK is missing: the number of this machine, from 0"}
master=${MASTER:?"MASTER is missing: the address of machine 0"}
# Megatron's tensor parallelism counts on one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec torchrun --nnodes "$nodes" --node-rank "$rank" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$master" --master-port "${PORT:-29500}" \
    -m megatron_rc.launch.train_ppo --config "$config" "$@"
