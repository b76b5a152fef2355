#!/bin/bash
# A build as a job of a Ray cluster that runs already, with the recipe and what lies beside it sent along.
#
#   RAY_API_SERVER_ADDRESS=http://head:8265 bash recipes/clusters/ray-job-submit.sh recipes/ray-cluster.yaml [more]
#
# The job runs on the head, and your connection may end. Variables of `env_vars`, such as credentials, reach all
# tasks. If the cluster or the job is stopped, submit the same line again: it continues with the finished tasks.
set -euo pipefail

recipe=${1:?give the recipe}
shift
exec ray job submit --no-wait --working-dir "$(dirname "$recipe")" \
  --runtime-env-json '{"env_vars": {"AWS_DEFAULT_REGION": "us-east-1"}}' \
  -- shardkit build "$(basename "$recipe")" --engine ray --ray-address auto "$@"
