#!/bin/bash
# A build on a Ray cluster that lives as long as one multi-node parallel job of AWS Batch. Each node runs this:
# the main one starts the head and builds, the others join it until it ends, which ends the job.
#
#   aws batch register-job-definition --cli-input-json file://recipes/clusters/aws-batch.json
#   aws batch submit-job --job-name web-v1 --job-queue QUEUE --job-definition shardkit-build
#
# The image is that of rayjob.yaml with this file in /build. Batch runs such jobs on on-demand instances only,
# and ends a job that loses a node: another attempt continues with the tasks that were finished.
set -euo pipefail

store=--object-store-memory=100000000    # records of tasks pass through it, nothing else
if [ "$AWS_BATCH_JOB_NODE_INDEX" != "$AWS_BATCH_JOB_MAIN_NODE_INDEX" ]; then
  until ray start --block --address="$AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:6379" $store; do
    sleep 5
  done
  exit
fi
ray start --head --port=6379 --include-dashboard=false $store
exec shardkit build "$@" --engine ray --ray-address auto
