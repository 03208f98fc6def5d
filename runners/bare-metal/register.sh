#!/usr/bin/env bash
# Rendered by `assay runners render`: edit runners/*.toml or its template, not this file.
#
# Run one job: check the health of the machine, register for a single job, run it, check again. systemd
# or launchd starts this as root, and again after each job. Only root reads the credential; the job runs as
# ASSAY_USER, in new folders.
#
#   register.sh --check runners/VENDOR/runner.env
#
# This names everything that a job needs and this machine lacks. It runs in a checkout, without root or a
# credential. Exit code: 0 if nothing is missing, else 1.
#
# ASSAY_*                from the environment file
# STATE_DIRECTORY        contains the folders of the job
# CREDENTIALS_DIRECTORY  contains the file `credential` of a GitHub App or person that may write the organization's
#                        self-hosted runners: the App's ID and below it its private key, or a token
# ASSAY_POLL_SECONDS     the interval between checks of the job, default 10
# ASSAY_RETRY_SECONDS    the wait after the second failure in a row, about doubled after each further
#                        one, default 30
# ASSAY_RELEASE_SECONDS  the wait until the cards are free of the job's leftover processes, default 10
#
# Exit code: 0 after a job; 75 the machine must not be used until an operator has checked it; 1
# temporary problems, such as no answer from GitHub.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

require() { # FIX COMMAND...
    local fix=$1
    shift
    "$@" >/dev/null 2>&1 && return
    echo "assay: install $fix" >&2
    complete=false
}

has_device_node() {
    local patterns pattern
    read -ra patterns <<<"$ASSAY_DEVICE_NODES"
    for pattern in ${patterns[@]+"${patterns[@]}"}; do
        ! compgen -G "/$pattern" || return 0
    done
    return 1
}

# -I: jobs do not see the packages of the person who checks.
check_machine() { # SETTINGS
    local complete=true python=(python3 -I -c) module sickness
    set -a
    # shellcheck source=/dev/null
    . "$1"
    require git command -v git
    require curl command -v curl
    require openssl command -v openssl
    require "a C++ compiler (g++): DeepSpeed compiles its CPU Adam at the first use" command -v c++
    require "Python 3.11 or newer, as python3" "${python[@]}" 'import sys; sys.exit(sys.version_info < (3, 11))'
    require "pip for python3 (python3-pip)" "${python[@]}" 'import pip'
    require "venv for python3 (python3-venv)" "${python[@]}" 'import ensurepip, venv'
    require "the headers of python3 (python3-dev), for the C++ compiler" "${python[@]}" \
        'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
    for module in ${ASSAY_TORCH_MODULES:-}; do
        require "the vendor's torch for python3, which cannot import $module" "${python[@]}" "import $module"
    done
    if ((ASSAY_CARDS > 0)); then
        sickness=$("$here/../health.sh" "$(dirname "$1")/health.json" 2>&1 >/dev/null) || true
        require "the vendor's driver and health program: ${sickness#*used: }" [ -z "$sickness" ]
        require "the vendor's driver, which makes one of: $ASSAY_DEVICE_NODES" has_device_node
    fi
    $complete
}

if [ "${1:-}" = --check ]; then
    if [ ! -f "${2:-}" ]; then
        echo "assay: usage: $0 --check runners/VENDOR/runner.env" >&2
        exit 2
    fi
    check_machine "$2"
    exit
fi

work=${STATE_DIRECTORY:?}
api=https://api.github.com
organization=$api/orgs/${ASSAY_ORGANISATION:?}
credential=${CREDENTIALS_DIRECTORY:?}/credential

fail() { # EXIT_CODE MESSAGE
    echo "assay: $2" >&2
    exit "$1"
}

# Retry at once, then after 1, 3, 7, ... 63 times ASSAY_RETRY_SECONDS.
try_later() { # MESSAGE
    local failures
    failures=$(($(cat "$work/failures" 2>/dev/null || echo 0) + 1))
    echo "$failures" >"$work/failures"
    echo "assay: $1" >&2
    sleep $((((1 << (failures < 7 ? failures - 1 : 6)) - 1) * ${ASSAY_RETRY_SECONDS:-30}))
    exit 1
}

as_runner() { # COMMAND...
    local clean=(env -u CREDENTIALS_DIRECTORY HOME="$work/home" "$@")
    if command -v setpriv >/dev/null; then
        exec setpriv --reuid "$ASSAY_USER" --regid "$ASSAY_USER" --init-groups --no-new-privs "${clean[@]}"
    fi
    exec sudo --preserve-env --user "$ASSAY_USER" "${clean[@]}"
}

is_healthy() {
    ((ASSAY_CARDS == 0)) || (as_runner "$here/health.sh")
}

# Pass the token through a file descriptor: other users can see arguments and environments.
call_github() { # TOKEN ARGUMENTS...
    curl --config <(printf 'header = "Authorization: Bearer %s"\n' "$1") \
        --fail --silent --show-error --max-time 60 --retry 5 --retry-delay 10 \
        --header "Accept: application/vnd.github+json" --header "X-GitHub-Api-Version: 2022-11-28" "${@:2}"
}

# Without an answer, curl has said why.
read_field() { # NAME
    python3 -I -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1" 2>/dev/null
}

encode() {
    openssl base64 -A | tr '+/' '-_' | tr -d '='
}

# https://docs.github.com/en/apps/creating-github-apps/authenticating-with-a-github-app/generating-a-json-web-token-jwt-for-a-github-app
sign_as_app() {
    local now app words
    now=$(date +%s)
    read -r app <"$credential"
    words=$(printf '{"alg":"RS256","typ":"JWT"}' | encode)
    words+=.$(printf '{"iat":%d,"exp":%d,"iss":"%s"}' $((now - 60)) $((now + 300)) "$app" | encode)
    echo "$words.$(printf %s "$words" | openssl dgst -sha256 -sign "$credential" | encode)"
}

# https://docs.github.com/en/apps/creating-github-apps/authenticating-with-a-github-app/generating-an-installation-access-token-for-a-github-app
find_token() {
    local signed installation
    grep -q "PRIVATE KEY" "$credential" || { cat "$credential" && return; }
    signed=$(sign_as_app)
    installation=$(call_github "$signed" "$organization/installation" | read_field id) &&
        call_github "$signed" --request POST "$api/app/installations/$installation/access_tokens" | read_field token
}

find_group() { # TOKEN
    call_github "$1" "$organization/actions/runner-groups?per_page=100" | python3 -I -c '
import json, sys
groups = json.load(sys.stdin)["runner_groups"]
print(next((group["id"] for group in groups if group["name"] == sys.argv[1]), ""))
' "$ASSAY_RUNNER_GROUP"
}

generate_jitconfig() { # TOKEN GROUP_ID
    local name body
    name=$(uname -n | cut -d. -f1 | cut -c1-20)-$ASSAY_TARGET-$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')
    body=$(python3 -I -c '
import json, sys
name, group, label = sys.argv[1:]
print(json.dumps({"name": name, "runner_group_id": int(group), "labels": [label], "work_folder": "_work"}))
' "$name" "$2" "$ASSAY_LABEL")
    call_github "$1" --request POST --data "$body" "$organization/actions/runners/generate-jitconfig" |
        read_field encoded_jit_config
}

# The runner writes this log when a job starts.
has_begun_a_job() {
    compgen -G "$work/runner/_diag/Worker_*" >/dev/null
}

run_job() { # sets `code`
    local runner started=""
    # A single-use secret, which every user of the machine could read in an argument.
    ACTIONS_RUNNER_INPUT_JITCONFIG=$1 as_runner "$work/runner/run.sh" &
    runner=$!
    while kill -0 "$runner" 2>/dev/null; do
        sleep "${ASSAY_POLL_SECONDS:-10}"
        # The time limit starts with the job.
        if [ -z "$started" ] && has_begun_a_job; then
            started=$SECONDS
        fi
        if [ -n "$started" ] && ((SECONDS - started > ASSAY_JOB_MINUTES * 60)); then
            kill -KILL "$runner"
            fail 75 "this machine must not be used: its job did not end within $ASSAY_JOB_MINUTES minutes"
        fi
    done
    code=0
    wait "$runner" || code=$?
    # Leftover processes of the job may hold a card.
    pkill -KILL -u "$ASSAY_USER" || true
}

rm -rf "${work:?}/runner" "${work:?}/home"
mkdir -p "$work/home"
cp -R "$here/runner" "$work/runner"
chown -R "$ASSAY_USER" "$work/runner" "$work/home"
if ((ASSAY_CARDS > 0)); then
    export ACTIONS_RUNNER_HOOK_JOB_STARTED=$here/health.sh
    export ACTIONS_RUNNER_HOOK_JOB_COMPLETED=$here/health.sh
fi
# Make run.sh report by its exit code that it is too old, and forward signals to the job.
export ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE=1 RUNNER_MANUALLY_TRAP_SIG=1

is_healthy || exit 75
token=$(find_token) || try_later "GitHub gives the App no token for $ASSAY_ORGANISATION: check its ID, key and installation"
group=$(find_group "$token") || try_later "GitHub does not list the runner groups of $ASSAY_ORGANISATION: check the credential"
[ -n "$group" ] || try_later "$ASSAY_ORGANISATION has no runner group $ASSAY_RUNNER_GROUP"
jitconfig=$(generate_jitconfig "$token" "$group") || try_later "GitHub gives no configuration for $ASSAY_LABEL"
run_job "$jitconfig"
if ! is_healthy; then
    sleep "${ASSAY_RELEASE_SECONDS:-10}"
    is_healthy || exit 75
fi
((code != 7)) || fail 75 "GitHub requires a newer runner: install one with bootstrap.sh"
((code == 0)) || try_later "the runner ended with exit code $code"
# run.sh also exits with 0 without a job, for example if GitHub refuses its configuration.
has_begun_a_job || try_later "the runner ended without a job"
rm -f "$work/failures"
