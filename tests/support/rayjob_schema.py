"""Schema of the RayJobs that this project writes: types, required keys, and no other key.

Written from the documentation of the API. With KUBERAY_CRD a test holds it against the definition that
KubeRay publishes.
"""

TEXT, WHOLE, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGT]i?)?$"}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}


def an(properties, *required):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def some(items):
    return {"type": "array", "items": items}


_TEXTS = {"type": "object", "additionalProperties": TEXT}
_VARIABLE = an(
    {"name": TEXT, "value": TEXT, "valueFrom": an({"secretKeyRef": an({"name": TEXT, "key": TEXT}, "key")})},
    "name",
)
_CONTAINER = an(
    {
        "name": TEXT,
        "image": TEXT,
        "env": some(_VARIABLE),
        "envFrom": some(an({"secretRef": an({"name": TEXT})})),
        "ports": some(an({"name": TEXT, "containerPort": WHOLE}, "containerPort")),
        "resources": an({"limits": {"type": "object", "additionalProperties": QUANTITY}}),
        "volumeMounts": some(an({"name": TEXT, "mountPath": TEXT, "readOnly": TRUTH}, "name", "mountPath")),
    },
    "name",
)
_VOLUME = an(
    {
        "name": TEXT,
        "configMap": an({"name": TEXT}),
        "persistentVolumeClaim": an({"claimName": TEXT}, "claimName"),
        "emptyDir": an({"medium": TEXT, "sizeLimit": {}}),
    },
    "name",
)
_POD = an(
    {
        "securityContext": an({"fsGroup": WHOLE}),
        "terminationGracePeriodSeconds": WHOLE,
        "containers": some(_CONTAINER),
        "tolerations": some(an({"key": TEXT, "operator": TEXT, "effect": TEXT})),
        "volumes": some(_VOLUME),
    },
    "containers",
)
_TEMPLATE = an({"spec": _POD})
_GROUP = an(
    {
        "groupName": TEXT,
        "replicas": WHOLE,
        "minReplicas": WHOLE,
        "maxReplicas": WHOLE,
        "rayStartParams": _TEXTS,
        "template": _TEMPLATE,
    },
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
)
_CLUSTER = an(
    {
        "rayVersion": TEXT,
        "authOptions": an({"mode": {"type": "string", "enum": ["disabled", "token"]}}),
        "headGroupSpec": an({"rayStartParams": _TEXTS, "template": _TEMPLATE}, "template"),
        "workerGroupSpecs": some(_GROUP),
    },
    "headGroupSpec",
)
RAYJOB = an(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": an({"name": NAME, "namespace": TEXT, "labels": _TEXTS}, "name"),
        "spec": an(
            {
                "entrypoint": TEXT,
                "entrypointNumCpus": NUMBER,
                "entrypointResources": TEXT,
                "runtimeEnvYAML": TEXT,
                "backoffLimit": WHOLE,
                "activeDeadlineSeconds": WHOLE,
                "shutdownAfterJobFinishes": TRUTH,
                "ttlSecondsAfterFinished": WHOLE,
                "rayClusterSpec": _CLUSTER,
            },
            "entrypoint",
            "rayClusterSpec",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
