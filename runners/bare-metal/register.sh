#!/usr/bin/env bash
# Rendered from runners/runners.toml by `assay runners render`; edit that.
# Takes one job: asks GitHub for a configuration that is good for one, runs it, ends.
set -euo pipefail

health=${ASSAY_HEALTH:-/opt/assay/health.sh}
[ ! -x "$health" ] || "$health"

if [ -z "${ASSAY_GROUP_ID:-}" ]; then
  echo "ASSAY_GROUP_ID is empty: the number of the runner group" >&2
  exit 78
fi
name="$ASSAY_LABEL-$(hostname)-$(date +%s)"
body=$(printf '{"name": "%s", "runner_group_id": %d, "labels": ["%s"], "work_folder": "_work"}' \
  "$name" "$ASSAY_GROUP_ID" "$ASSAY_LABEL")
# The token reaches curl through a file descriptor: arguments are seen by every process.
answer=$(curl --fail --silent --show-error --max-time 60 --retry 3 \
  --header @<(printf 'Authorization: Bearer %s\n' "$(cat "$CREDENTIALS_DIRECTORY/token")") \
  --header "Accept: application/vnd.github+json" --data "$body" \
  "${ASSAY_API:-https://api.github.com}/orgs/$ASSAY_ORGANIZATION/actions/runners/generate-jitconfig")
configuration=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["encoded_jit_config"])' <<<"$answer")

"${ASSAY_RUN:-/opt/actions-runner/run.sh}" --jitconfig "$configuration"
[ ! -x "$health" ] || "$health"
