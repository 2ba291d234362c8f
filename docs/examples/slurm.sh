#!/bin/bash
# Two nodes with eight GPUs each train one run: `sbatch slurm.sh`. Every task is a rank.
#SBATCH --job-name=freescale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

srun --kill-on-bad-exit=0 freescale train recipe.yaml run.out=/shared/runs/first
code=$?
if [ $code -eq 75 ]; then # told to stop, saved: goes on from there when it is started again
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
