#!/usr/bin/env bash
# A Ray cluster over the nodes of a Slurm allocation, and one run in it:
#   sbatch --nodes=2 examples/cluster/slurm.sh run.toml [key=value ...]
# The run file says `cluster.runtime = "ray"`. The environment of Paceline must be active on all
# nodes (a shared file system, or a module), and `run.dir` a folder that they share.
#SBATCH --job-name=paceline
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=paceline-%j.log
#SBATCH --signal=B:TERM@120
set -euo pipefail

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head="${nodes[0]}"
head_ip="$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')"
port="${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
# Several jobs on one machine stay apart.
temp="/tmp/ray-$SLURM_JOB_ID"
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$(head -c 32 /dev/urandom | sha256sum | cut -c1-64)"
export RAY_AUTH_TOKEN

start() { # node, further arguments of `ray start`
    srun --nodes=1 --ntasks=1 --overlap -w "$1" \
        ray start --block --disable-usage-stats --temp-dir="$temp" "${@:2}" &
}

start "$head" --head --node-ip-address="$head_ip" --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
    start "$node" --address="$head_ip:$port"
done

# The run itself, once every node has joined, on the head, where this script runs: without srun,
# which kills its tasks when it is signalled. A shorter allocation than the run needs is no loss:
# submit it again, and it goes on from its newest checkpoint.
export RAY_ADDRESS="$head_ip:$port" NUM_NODES="${#nodes[@]}"
python - <<'PY'
import os, sys, time
import ray

end = time.monotonic() + 300
while True:
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")
        there = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, RuntimeError):
        there = 0
    if there >= int(os.environ["NUM_NODES"]):
        break
    if time.monotonic() > end:
        sys.exit(f"after 300 s {there} of {os.environ['NUM_NODES']} nodes have joined")
    time.sleep(2)
PY
paceline train "$@" &
driver=$!
# Slurm's notice before the end of the time: let the run close what it has open.
trap 'kill -TERM "$driver" 2>/dev/null || true' TERM
status=0
wait "$driver" || status=$?
# A signal ends the first `wait`, not yet the run.
while kill -0 "$driver" 2>/dev/null; do
    wait "$driver" || status=$?
done
exit "$status" # Slurm ends what is left: the cluster of this allocation
