"""The SLURM batch script of a job."""

from __future__ import annotations

import shlex
from pathlib import Path

from vorox.cli.launch.job import SAVED_EXIT_CODE, Job
from vorox.cli.launch.restarts import JOB_FINAL_EXIT_CODES

_MOST_NOTICE_SECONDS = 65535
"""``sbatch --signal`` accepts no longer time."""
_SCRIPT = """\
#!/bin/bash
# {name} on {machines}. Submit: sbatch THIS_FILE. Each start runs the same command, which resumes the run.
#SBATCH --job-name={name}
# One launcher on each machine; it starts a rank for each device.
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{resources}
#SBATCH --time={time}
# The working directory must be on shared storage, as runs and caches.
#SBATCH --chdir={directory}
# A requeued job continues its log.
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM to the ranks so many seconds before the time limit, and at a pre-emption if the cluster sends it then
# (PreemptParameters=send_user_signal).
# {notice}.
#SBATCH --signal=TERM@{notice_seconds}

{setup}{secrets}first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export VOROX_COORDINATOR="$first:$((10000 + SLURM_JOB_ID % 20000))"
export VOROX_NODE_COUNT="$SLURM_JOB_NUM_NODES"
# By this secret the ranks recognise each other's messages; it is drawn at every start and kept nowhere.
VOROX_RANK_SECRET=${{VOROX_RANK_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}}
export VOROX_RANK_SECRET

# If only this shell gets SIGTERM, pass it to the ranks; then wait for their save.
signalled=
trap 'signalled=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# --kill-on-bad-exit=0 --wait=0: a rank that has stopped must not end the others while they save.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
  bash -c 'VOROX_NODE_INDEX="$SLURM_NODEID" exec "$@"' node \\
  {command} &
step=$!
while true; do
  wait "$step"
  code=$?
  [ -n "$signalled" ] || break
  signalled=
done

case "$code" in
  0) exit 0 ;;
  {saved})
    echo "Saved and stopped on request: requeueing."
    scontrol requeue "$SLURM_JOB_ID"
    exit {saved}
    ;;
  {final})
    echo "Exit code $code: another start would end the same way. Not requeued."
    exit "$code"
    ;;
esac

# Anything else may be the fault of a machine: requeue, {max_restarts} times in total.
crashes={crashes}-"$SLURM_JOB_ID"
count=$(($(cat "$crashes" 2>/dev/null || echo 0) + 1))
echo "$count" >"$crashes"
if [ "$count" -le {max_restarts} ]; then
  echo "Exit code $code: requeueing ($count of {max_restarts})."
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(job: Job, *, time: str, partition: str | None, account: str | None, setup: str | None) -> str:
    """Return the batch script.

    Args:
        job: The job.
        time: Time limit, as SLURM writes it.
        partition: Partition; ``None``: SLURM's default.
        account: Account; ``None``: SLURM's default.
        setup: Shell command before the run, such as one that activates an environment.
    """
    options = [f"#SBATCH --gpus-per-node={job.devices_per_node}"] if job.uses_gpus else []
    options += [
        f"#SBATCH --{key}={shlex.quote(value)}"
        for key, value in (("partition", partition), ("account", account))
        if value
    ]
    machines = f"{job.num_nodes} x {job.devices_per_node} devices"
    return _SCRIPT.format(
        name=job.name, machines=machines, num_nodes=job.num_nodes, cpus=job.cpus_per_node, time=shlex.quote(time),
        resources="\n".join(options) or f"# No GPUs: runtime.device={job.config.runtime.device}.",
        directory=shlex.quote(str(Path.cwd())),
        notice=job.notice.reason, notice_seconds=min(job.notice.seconds, _MOST_NOTICE_SECONDS),
        setup=f"{setup} || exit 1\n" if setup else "",
        secrets="".join(f': "${{{name}:?export it before sbatch}}"\n' for name in job.secrets),
        command=shlex.join(job.command()), saved=SAVED_EXIT_CODE, final="|".join(map(str, JOB_FINAL_EXIT_CODES)),
        max_restarts=job.max_restarts, crashes=shlex.quote(f"{job.shared or '.'}/{job.name}-crashes"),
    )  # fmt: skip
