#!/usr/bin/env bash
# Rendered by `assay runners render`: edit runners/*.toml or its template, not this file.
#
# Makes this machine a runner: its user, the runner of GitHub, and the unit that asks for jobs.
#
#   sudo runners/bare-metal/bootstrap.sh runners/VENDOR/runner.env RUNNER.tar.gz SHA256
#
# RUNNER.tar.gz is a file or an https address; what does not have this SHA-256 is not unpacked.
# DESTDIR is the root of an image that is being made: all of it goes there, and nothing is started. Where
# it has no device nodes yet, add the user to their groups.
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
[[ $checksum =~ ^[0-9a-f]{64}$ ]] || fail "the third argument is no SHA-256: 64 digits, a to f in lower case"
[ -f "$settings" ] || fail "$settings is no file"
target=$(sed -n 's/^ASSAY_TARGET=//p' "$settings")
[[ $target =~ ^[a-z0-9-]+$ ]] || fail "$settings names no ASSAY_TARGET"
[[ -z $root || $root == /* ]] || fail "DESTDIR has to begin with a slash"
[ -n "$root" ] || (($(id -u) == 0)) || fail "only root can do this: sudo $0 ..."
for other in "$root/etc/assay-runner"/*.env; do
    [ ! -e "$other" ] || [ "${other##*/}" = "$target.env" ] ||
        fail "this machine is a runner already, by $other: both would have the same cards"
done
[ -f "$root/etc/assay-runner/token" ] || fail "put the token into /etc/assay-runner/token first; README.md says how"

fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
if [[ $archive == https://* ]]; then
    curl --fail --silent --show-error --location --proto =https --output "$fetched/runner.tar.gz" "$archive"
    archive=$fetched/runner.tar.gz
fi
[ -f "$archive" ] || fail "$archive is no file"
if command -v sha256sum >/dev/null; then
    actual=$(sha256sum <"$archive")
else
    actual=$(shasum -a 256 <"$archive")
fi
[ "${actual%% *}" = "$checksum" ] || fail "$archive has the SHA-256 ${actual%% *}, not $checksum"

in_root=(--root "${root:-/}")
if [ "$(uname -s)" = Darwin ]; then
    [ -n "$root" ] || has_user || fail "make a user $user without administrator's rights first"
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
# A unit that is running copies the runner before each job: it must never see half of one.
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
chmod 600 "$etc/token"
install -m 644 "$settings" "$etc/$target.env"

if [ "$(uname -s)" = Darwin ]; then
    service=system/org.assay.runner.$target
    daemon=/Library/LaunchDaemons/org.assay.runner.$target.plist
    mkdir -p "$root/Library/LaunchDaemons" "$root/var/assay-runner/$target"
    sed "s/@TARGET@/$target/g" "$here/assay-runner.plist" >"$fetched/plist"
    if [ -n "$root" ]; then
        install -m 644 "$fetched/plist" "$root$daemon"
    elif cmp -s "$fetched/plist" "$daemon" && launchctl print "$service" >/dev/null 2>&1; then
        # One that stayed down starts; one that runs goes on, and takes the new runner for its next job.
        launchctl kickstart "$service"
    else
        install -m 644 "$fetched/plist" "$daemon"
        launchctl bootout "$service" 2>/dev/null || true
        # It goes on for seconds, and launchctl would refuse a second one.
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
echo "assay-runner@$target is installed; GitHub lists it as soon as it has registered"
