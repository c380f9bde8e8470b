"""The Kubernetes manifest of a job: configuration, headless Service and indexed Job."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from vorox.cli.launch.job import PORT, SAVED_EXIT_CODE, Job
from vorox.cli.launch.restarts import JOB_FINAL_EXIT_CODES
from vorox.core.config import dump_yaml

_CONFIGURATION = "/etc/vorox/config.yaml"
_MANIFEST = """\
# {name} on {num_nodes} x {devices} devices. Submit: kubectl apply -f THIS_FILE
# After the job has failed or finished: kubectl delete job {name}, then apply again; the run resumes.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  config.yaml: |
{configuration}
---
# A name for each pod, so that the ranks find rank 0.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed            # pod N is machine N
  completions: {num_nodes}
  parallelism: {num_nodes}
  # {max_restarts} crashes, each of which ends every pod.
  backoffLimit: {backoff_limit}
  podReplacementPolicy: Failed       # a new pod starts after the old one has ended
  podFailurePolicy:
    rules:
      - action: FailJob              # another start would end the same way
        onExitCodes:
          containerName: vorox
          operator: In
          values: {final}
      - action: Ignore               # saved and stopped on request: start again, without counting
        onExitCodes:
          containerName: vorox
          operator: In
          values: [{saved}]
      - action: Ignore               # pre-empted, evicted or drained
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
  template:
    spec:
      restartPolicy: Never
      subdomain: {name}
      # From SIGTERM to SIGKILL; {notice}.
      terminationGracePeriodSeconds: {notice_seconds}
      containers:
        - name: vorox
          image: {image}
          command: {command}
          workingDir: {shared}
          env:
{environment}
          resources:
            requests: {{cpu: "{cpus}"}}
{limits}          volumeMounts:
            - {{name: shared, mountPath: {shared}}}
            - {{name: configuration, mountPath: /etc/vorox, readOnly: true}}
            - {{name: memory, mountPath: /dev/shm}}
      volumes:
        - name: shared               # runs and caches; ReadWriteMany if there are several machines
          persistentVolumeClaim: {{claimName: {volume}}}
        - name: configuration
          configMap: {{name: {name}}}
        - name: memory               # NCCL needs more shared memory than a container's 64 MB
          emptyDir: {{medium: Memory}}
"""


def kubernetes_manifest(job: Job, *, image: str, volume: str, secrets_from: str) -> str:
    """Return the manifest.

    Args:
        job: The job.
        image: Container image with Vorox and its engine.
        volume: PersistentVolumeClaim of the shared directory.
        secrets_from: Secret with a key for each of ``job.secrets``.
    """
    gpus = f'            limits: {{nvidia.com/gpu: "{job.devices_per_node}"}}\n'
    return _MANIFEST.format(
        name=job.name, num_nodes=job.num_nodes, devices=job.devices_per_node, cpus=job.cpus_per_node,
        configuration=textwrap.indent(dump_yaml(job.config).rstrip(), "    "),
        backoff_limit=job.max_restarts * job.num_nodes, max_restarts=job.max_restarts,
        final=list(JOB_FINAL_EXIT_CODES), saved=SAVED_EXIT_CODE, notice=job.notice.reason,
        notice_seconds=job.notice.seconds, image=json.dumps(image), command=json.dumps(job.command(_CONFIGURATION)),
        shared=json.dumps(job.shared),
        environment=textwrap.indent("\n".join(_environment(job, secrets_from)), " " * 12),
        limits=gpus if job.uses_gpus else "", volume=json.dumps(volume),
    )  # fmt: skip


def _environment(job: Job, secrets_from: str) -> Iterator[str]:
    yield f'- {{name: VOROX_COORDINATOR, value: "{job.name}-0.{job.name}:{PORT}"}}'
    yield f'- {{name: VOROX_NODE_COUNT, value: "{job.num_nodes}"}}'
    yield "- name: VOROX_NODE_INDEX"
    yield "  valueFrom:"
    yield "    fieldRef: {fieldPath: \"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}"
    for name in job.secrets:
        yield f"- name: {name}"
        yield f"  valueFrom: {{secretKeyRef: {{name: {json.dumps(secrets_from)}, key: {name}}}}}"
