"""KubeRay's API (`ray.io/v1`) of a RayCluster, as a JSON Schema.

Its custom resource definition is in no package registry, so names, types and required fields are copied here from
KubeRay's Go types (`RayClusterSpec`, `HeadGroupSpec`, `WorkerGroupSpec`), as of release 1.1, and were compared with the
definition in KubeRay's Helm chart (its commit 017710c): it has all of these names with these types, and more; it
requires nothing beyond these, and no longer `rayStartParams`. The schema is closed: a field that is not here is a
finding. Pod templates have Kubernetes' own schema and stay open.
"""

from __future__ import annotations

from typing import Any

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
FLAG = {"type": "boolean"}
OPEN = {"type": "object"}


def _closed(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


HEAD_GROUP = _closed(
    ("rayStartParams", "template"),
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    headService=OPEN,
    rayStartParams=TEXTS,
    template=OPEN,
)
WORKER_GROUP = _closed(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template=OPEN,
    scaleStrategy=_closed((), workersToDelete={"type": "array", "items": {"type": "string"}}),
)
RAY_CLUSTER = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=OPEN,
    spec=_closed(
        ("headGroupSpec",),
        rayVersion={"type": "string"},
        enableInTreeAutoscaling=FLAG,
        autoscalerOptions=OPEN,
        headServiceAnnotations=TEXTS,
        suspend=FLAG,
        headGroupSpec=HEAD_GROUP,
        workerGroupSpecs={"type": "array", "items": WORKER_GROUP},
    ),
)
