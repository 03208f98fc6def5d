#!/usr/bin/env bash
# Rendered from runners/runners.toml by `assay runners render`; edit that.
# Makes this machine a runner: a user, the runner, a unit. It downloads nothing.
set -euo pipefail

if [ "$#" -lt 3 ]; then
  echo "usage: $0 RUNNER.env ACTIONS_RUNNER.tar.gz SHA256 [HEALTH.sh]" >&2
  exit 2
fi
settings=$1 archive=$2 checksum=$3 health=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
name=$(basename "$(dirname "$(realpath "$settings")")")
cards=$(sed -n 's/^ASSAY_CARDS=//p' "$settings")
[ "$cards" -le 1 ] || name="$name-$cards"

echo "$checksum  $archive" | sha256sum --check --status || {
  echo "$archive is not the file with the checksum $checksum" >&2
  exit 2
}
[ -s /etc/assay/token ] || {
  echo "/etc/assay/token is missing: a token that may register runners, readable by root alone" >&2
  exit 2
}
id assay-runner >/dev/null 2>&1 || useradd --system --create-home --home-dir /opt/actions-runner assay-runner
tar --extract --gzip --file "$archive" --directory /opt/actions-runner
mkdir -p /opt/actions-runner/_work
chown --recursive assay-runner: /opt/actions-runner
install -D --mode 755 "$here/register.sh" /opt/assay/register.sh
[ -z "$health" ] || install -D --mode 755 "$health" /opt/assay/health.sh
install -D --mode 644 "$settings" "/etc/assay/$name.env"
install -D --mode 644 "$here/assay-runner@.service" /etc/systemd/system/assay-runner@.service
chmod 600 /etc/assay/token
systemctl daemon-reload
echo "Set ASSAY_GROUP_ID in /etc/assay/$name.env, then: systemctl enable --now assay-runner@$name"
