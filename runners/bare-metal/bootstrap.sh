#!/usr/bin/env bash
# Rendered by `assay runners render`: edit runners/*.toml or its template, not this file.
#
# Make this machine a runner: create its user, and install GitHub's runner and the unit that requests jobs.
#
#   sudo runners/bare-metal/bootstrap.sh runners/VENDOR/runner.env RUNNER.tar.gz SHA256
#
# RUNNER.tar.gz is a file or an https address, and must have this SHA-256.
# DESTDIR is the root of a machine image: everything is installed there and nothing is started. If it has no
# device nodes yet, add the user to their groups yourself.
set -euo pipefail

user=assay-runner
root=${DESTDIR:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "assay: $1" >&2
    exit 2
}

has_user() {
    if [ -n "$root" ]; then
        grep -qs "^$user:" "$root/etc/passwd"
    else
        id "$user" >/dev/null 2>&1
    fi
}

(($# == 3)) || fail "usage: sudo $0 runners/VENDOR/runner.env RUNNER.tar.gz SHA256"
settings=$1 archive=$2 checksum=$3
[[ $checksum =~ ^[0-9a-f]{64}$ ]] || fail "the third argument is not a SHA-256: 64 hexadecimal digits in lower case"
[ -f "$settings" ] || fail "$settings is not a file"
target=$(sed -n 's/^ASSAY_TARGET=//p' "$settings")
[[ $target =~ ^[a-z0-9-]+$ ]] || fail "$settings does not set ASSAY_TARGET"
[[ -z $root || $root == /* ]] || fail "DESTDIR must start with a slash"
[ -n "$root" ] || "$here/register.sh" --check "$settings" || fail "this machine lacks what the lines above name"
[ -n "$root" ] || (($(id -u) == 0)) || fail "only root can do this: sudo $0 ..."
for other in "$root/etc/assay-runner"/*.env; do
    [ ! -e "$other" ] || [ "${other##*/}" = "$target.env" ] ||
        fail "this machine is already a runner ($other), and two runners would share its cards"
done
[ -f "$root/etc/assay-runner/credential" ] || fail "write /etc/assay-runner/credential first; see README.md"

fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
if [[ $archive == https://* ]]; then
    curl --fail --silent --show-error --location --proto =https --output "$fetched/runner.tar.gz" "$archive"
    archive=$fetched/runner.tar.gz
fi
[ -f "$archive" ] || fail "$archive is not a file"
if command -v sha256sum >/dev/null; then
    actual=$(sha256sum <"$archive")
else
    actual=$(shasum -a 256 <"$archive")
fi
[ "${actual%% *}" = "$checksum" ] || fail "$archive has the SHA-256 ${actual%% *}, not $checksum"

in_root=(--root "${root:-/}")
if [ "$(uname -s)" = Darwin ]; then
    [ -n "$root" ] || has_user || fail "create a user $user without administrator rights first"
elif ! has_user; then
    useradd "${in_root[@]}" --system --user-group --home-dir /var/lib/assay-runner --shell /usr/sbin/nologin "$user"
fi
read -ra patterns <<<"$(sed -n "s/^ASSAY_DEVICE_NODES=//p" "$settings" | tr -d "'")"
for pattern in ${patterns[@]+"${patterns[@]}"}; do
    while read -r node; do
        group=$(stat -c %G "$node")
        [[ $group == root || $group == UNKNOWN ]] || usermod "${in_root[@]}" --append --groups "$group" "$user"
    done < <([ "$(uname -s)" = Darwin ] || compgen -G "$root/$pattern" || true)
done

opt=$root/opt/assay-runner etc=$root/etc/assay-runner
# A running unit copies the runner before each job, and must never see an incomplete one.
rm -rf "$opt/runner.new"
mkdir -p "$opt/runner.new"
tar -xzf "$archive" --no-same-owner -C "$opt/runner.new"
if [ -x "$opt/runner.new/bin/installdependencies.sh" ] && [ -z "$root" ] && [ "$(uname -s)" != Darwin ]; then
    "$opt/runner.new/bin/installdependencies.sh"
fi
rm -rf "$opt/runner"
mv "$opt/runner.new" "$opt/runner"
install -m 755 "$here/register.sh" "$opt/register.sh"
health=$(dirname "$settings")/health.json
if [ -f "$health" ]; then
    install -m 755 "$here/../health.sh" "$opt/health.sh"
    install -m 644 "$health" "$opt/health.json"
fi
chown "$(id -u):$(id -g)" "$etc/credential"
chmod 600 "$etc/credential"
install -m 644 "$settings" "$etc/$target.env"

if [ "$(uname -s)" = Darwin ]; then
    service=system/org.assay.runner.$target
    daemon=/Library/LaunchDaemons/org.assay.runner.$target.plist
    mkdir -p "$root/Library/LaunchDaemons" "$root/var/assay-runner/$target"
    sed "s/@TARGET@/$target/g" "$here/assay-runner.plist" >"$fetched/plist"
    if [ -n "$root" ]; then
        install -m 644 "$fetched/plist" "$root$daemon"
    elif cmp -s "$fetched/plist" "$daemon" && launchctl print "$service" >/dev/null 2>&1; then
        # Starts a daemon that is down. A running one uses the new runner for its next job.
        launchctl kickstart "$service"
    else
        install -m 644 "$fetched/plist" "$daemon"
        launchctl bootout "$service" 2>/dev/null || true
        # bootout takes seconds, and bootstrap fails until it has ended.
        for _ in {1..60}; do
            launchctl print "$service" >/dev/null 2>&1 || break
            sleep 2
        done
        launchctl bootstrap system "$daemon"
    fi
else
    mkdir -p "$root/etc/systemd/system"
    install -m 644 "$here/assay-runner@.service" "$root/etc/systemd/system/assay-runner@.service"
    if [ -z "$root" ]; then
        systemctl daemon-reload
        systemctl enable --now "assay-runner@$target.service"
    else
        mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
        ln -sf ../assay-runner@.service "$root/etc/systemd/system/multi-user.target.wants/assay-runner@$target.service"
    fi
fi
echo "assay-runner@$target is installed; GitHub lists it once it has registered"
