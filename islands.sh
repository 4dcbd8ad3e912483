#!/usr/bin/env bash
# Train every expert of a partition as an island: on its own pictures, in a folder of its own.
#
#   python -m ddm_min.partition --data DATA --clusters K --run RUN --export ISLANDS
#   ./islands.sh one-by-one|parallel|slurm ISLANDS RUN [arguments of train_expert.py for all]
#
# Run it here. Options for sbatch go into SBATCH_... variables. After a failure, start the same
# again: finished islands are kept, the others go on. At the end, RUN has all expert files.
set -euo pipefail
how=$1 islands=$2 run=$3 failed=0
last=$(($(find "$islands" -maxdepth 1 -name 'cluster_*' | wc -l) - 1))

island() {
  exec "${PYTHON:-python}" train_expert.py --data "folder:$islands/cluster_$1" \
    --classes "$islands/classes.json" --cluster "$1" --run "$run/island_$1" "${@:5}"
}
case $how in
  one-by-one) for k in $(seq 0 $last); do (island "$k" "$@") || failed=1; done ;;
  parallel) export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # islands share the cores
    for k in $(seq 0 $last); do TQDM_POSITION=$k island "$k" "$@" & done
    for job in $(jobs -p); do wait "$job" || failed=1; done ;;
  slurm) sbatch --wait --requeue --signal=B:TERM@120 --array="0-$last" "$0" task "${@:2}" || failed=1 ;;
  task) island "$SLURM_ARRAY_TASK_ID" "$@" ;;
  *) echo "$how: use one-by-one, parallel or slurm" >&2 && exit 2 ;;
esac
((failed)) && echo "an island failed: start the same command again" >&2 && exit 1
cp "$run"/island_*/expert_*.safetensors "$run"/
echo "$((last + 1)) islands are collected in $run"
