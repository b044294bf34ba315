"""An exported model behind Ray Serve, by the application of `girih serve`, in as many replicas as are asked for.

    girih export runs/first --out /shared/models/first
    GIRIH_MODEL=/shared/models/first serve run deploy.ray.serve:app

Paths are those of `girih serve`, as in /v2/models/first/infer. Replicas of a node map the same files, so that tables are in its memory once.
"""

import os
from pathlib import Path

from ray import serve


def application():
    """The ASGI application, built in each replica."""
    from girih.serving.app import application

    return application(Path(os.environ["GIRIH_MODEL"]))


replicas = serve.deployment(
    serve.ingress(application)(),
    name="girih",
    num_replicas=2,
    max_ongoing_requests=4,  # a replica answers one request after the other
    ray_actor_options={
        "num_cpus": 1,
        "runtime_env": {"env_vars": {"GIRIH_MODEL": os.environ.get("GIRIH_MODEL", "")}},
    },
)
app = replicas.bind()
