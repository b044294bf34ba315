#!/bin/sh
# A training run as a job of a Ray cluster that is there: ADDRESS is that of its dashboard, as http://head:8265.
# With token authentication, RAY_AUTH_MODE=token and the token (ray get-auth-token) stand in this shell's environment too.
#   sh deploy/ray/job.sh http://head:8265 config.toml /shared/runs/first
set -eu
address=$1 config=$2 run=$3
exec ray job submit --address "$address" --working-dir "$(dirname "$config")" -- \
    girih train "$(basename "$config")" --run "$run" --cluster auto
