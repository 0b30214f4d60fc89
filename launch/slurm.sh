#!/bin/sh
# Slurm: sbatch --nodes N launch/slurm.sh CONFIG [flags of the run]
#   GPUS: ranks on each machine; default: 8
#   PORT: free port of the first machine; default: 29500
#SBATCH --job-name=megatron_rc
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
# Five minutes before the time is up all ranks stop at the next step, and save where --save is given.
set -eu
config=${1:?"usage: sbatch --nodes N $0 CONFIG [flags]"}
shift
nodes=${SLURM_NNODES:?"SLURM_NNODES is missing: start this with sbatch"}
job=${SLURM_JOB_ID:?"SLURM_JOB_ID is missing: start this with sbatch"}
list=${SLURM_JOB_NODELIST:?"SLURM_JOB_NODELIST is missing: start this with sbatch"}
master=$(scontrol show hostnames "$list" | head -n 1)
# Torchrun would kill the ranks 30 s after that signal: a step of a large model and its save take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}"
# Megatron's tensor parallelism counts on one queue of work a GPU.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# One torchrun a machine; where one fails, Slurm ends the others too.
exec srun --kill-on-bad-exit=1 torchrun --nnodes "$nodes" --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$master:${PORT:-29500}" --rdzv-id "$job" \
    -m megatron_rc.launch.train_ppo --config "$config" "$@"
