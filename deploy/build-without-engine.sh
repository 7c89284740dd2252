#!/usr/bin/env bash
# Builds the image and runs it on a machine without a container engine: with Debian's buildah and chroot isolation, on a base that
# debootstrap creates. For a check of the Dockerfile and of the programs that it starts; not for production.
#
# The container starts, `orch doctor` finds nothing wrong in it, it trains the digits example to its end, answers a scrape, and stops cleanly
# on SIGTERM.
#
# usage: deploy/build-without-engine.sh [--keep]      as root; --keep keeps the image and the scratch folder
#
#   SCRATCH        folder for all files (default: a new one under TMPDIR); about 12 GB
#   WHEELS         folders with wheels for pip, separated by colons (for example a torch CPU build)
#   PIP_SETTINGS   a pip.conf to use while building, e.g. for a proxy
#   CA_BUNDLE      certificates to trust while building instead of Debian's
#   MIRROR         the Debian mirror for debootstrap (default: debootstrap's own)
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
scratch=${SCRATCH:-$(mktemp -d "${TMPDIR:-/tmp}/orch-image.XXXXXX")}
keep=no
[[ "${1:-}" == --keep ]] && keep=yes
container=
image=localhost/orch:check
base=localhost/orch-base:bookworm

say() { printf '== %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[[ $EUID -eq 0 ]] || die "run as root: debootstrap and chroot need it"
missing=()
for package in buildah debootstrap; do
  command -v "$package" >/dev/null || missing+=("$package")
done
if [[ ${#missing[@]} -gt 0 ]]; then
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# No overlay, no cgroups, no user namespaces: this machine may have none of them.
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
export CONTAINERS_STORAGE_CONF=$scratch/storage.conf
mkdir -p "$scratch"
cat > "$CONTAINERS_STORAGE_CONF" <<CONF
[storage]
driver = "vfs"
graphroot = "$scratch/graph"
runroot = "$scratch/run"
CONF

service=
# All descendants of a process. A search by name alone would also find processes of other users.
below() { local child; for child in $(pgrep -P "$1"); do echo "$child"; below "$child"; done; }
of_container() {
  local process
  for process in $(below "$service"); do
    tr '\0' ' ' < "/proc/$process/cmdline" 2>/dev/null | grep -q -- "$1" && { echo "$process"; return; }
  done
  return 1
}
cleanup() {
  [[ -n $service ]] && kill -KILL -- "-$service" 2>/dev/null
  [[ -n $container ]] && buildah rm "$container" >/dev/null 2>&1
  if [[ $keep == no ]]; then
    buildah rmi --all --force >/dev/null 2>&1
    rm -rf "$scratch"
  else
    say "kept in $scratch (STORAGE_DRIVER=vfs CONTAINERS_STORAGE_CONF=$CONTAINERS_STORAGE_CONF buildah images)"
  fi
  return 0
}
trap cleanup EXIT

say "base: Debian bookworm with its Python 3.11"
if [[ ! -d $scratch/base ]]; then
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$scratch/base.part" ${MIRROR:+"$MIRROR"} \
    > "$scratch/debootstrap.log" 2>&1 || { tail -5 "$scratch/debootstrap.log" >&2; die "debootstrap failed"; }
  rm -rf "$scratch/base.part/var/cache/apt/archives/"*.deb
  mv "$scratch/base.part" "$scratch/base"
fi
seed=$(buildah from scratch)
buildah add -q "$seed" "$scratch/base" / >/dev/null
buildah commit -q --rm "$seed" "$base" >/dev/null

say "context: what is committed or not ignored, and the wheels"
rm -rf "$scratch/context" && mkdir -p "$scratch/context"
git -C "$repository" ls-files -z --cached --others --exclude-standard |
  (cd "$repository" && xargs -0 sh -c 'for f; do [ -e "$f" ] && printf "%s\0" "$f"; done' sh) |
  tar -C "$repository" --null --files-from=- -cf - | tar -C "$scratch/context" -xf -
IFS=: read -r -a wheels <<< "${WHEELS:-}"
for folder in "${wheels[@]}"; do
  find "$folder" -maxdepth 1 -name '*.whl' -exec cp {} "$scratch/context/deploy/wheels/" \;
done

say "build"
mounts=()
[[ -n ${PIP_SETTINGS:-} ]] && mounts+=(--volume "$PIP_SETTINGS:/etc/pip.conf:ro")
[[ -n ${CA_BUNDLE:-} ]] && mounts+=(--volume "$CA_BUNDLE:/etc/ssl/certs/ca-certificates.crt:ro")
# Without --layers: this storage driver copies the whole image for each instruction, some 80 GB in all.
buildah bud --format docker --pull-never --network host --build-arg "BASE=$base" --build-arg VARIANT=cpu "${mounts[@]}" \
  --tag "$image" "$scratch/context" > "$scratch/build.log" 2>&1 || { tail -30 "$scratch/build.log" >&2; die "the build failed"; }
buildah inspect --type image --format '{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.StopSignal}}' "$image" >&2

say "start"
container=$(buildah from --pull-never "$image")
entry=(/usr/bin/tini -s -- /usr/local/bin/orch-entrypoint)
inside() { buildah run --user 10001:10001 --network host --env HOME=/var/lib/orch "$container" -- "$@"; }
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
setsid buildah run --user 10001:10001 --network host --env HOME=/var/lib/orch --env ORCH_METRICS_PORT="$port" "$container" -- \
  "${entry[@]}" orch serve > "$scratch/daemon.log" 2>&1 &
service=$!

# Over the port, not the socket, as a probe would request /readyz.
ask() { python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())' "http://127.0.0.1:$port$1"; }
for _ in $(seq 240); do
  ask /readyz >/dev/null 2>&1 && break
  kill -0 "$service" 2>/dev/null || { tail -30 "$scratch/daemon.log" >&2; die "the container ended"; }
  sleep 0.5
done
ask /readyz >/dev/null || { tail -30 "$scratch/daemon.log" >&2; die "the container is not ready after two minutes"; }
first=$(of_container '^/usr/bin/tini ') || die "its init process is not there"
uid=$(stat -c %u "/proc/$first")
[[ $uid -eq 10001 ]] || die "its init process belongs to uid $uid"
say "ready, as uid $uid"

say "doctor"
inside orch doctor || die "orch doctor found something wrong"

say "bill of materials"
inside cat /opt/orch/share/orch/sbom.cdx.json > "$scratch/sbom.cdx.json"
python3 - "$scratch/sbom.cdx.json" <<'CHECK' >&2 || die "the bill of materials does not name what is installed"
import json, sys
with open(sys.argv[1]) as file:
    bill = json.load(file)
versions = {part["name"].lower(): part["version"] for part in bill["components"]}
print(bill["bomFormat"], bill["specVersion"], len(versions), {name: versions[name] for name in ("orchd", "torch", "ray")})
CHECK

say "train: the digits example that the image carries"
inside sh -c '
  set -e
  example=$(python -c "from importlib.resources import files; print(files(\"orchestrator.data\") / \"digits\")")
  cp -r "$example" "$HOME/digits" && cd "$HOME/digits"
  exec orch submit job.yaml --wait' || die "the example did not train"

say "scrape"
ask /metrics > "$scratch/metrics.txt"
grep -q '^orch_daemon_info{' "$scratch/metrics.txt" || die "/metrics has no orch_daemon_info"
grep -q '^orch_jobs_finished_total{.*state="SUCCEEDED".*} [1-9]' "$scratch/metrics.txt" || die "/metrics knows of no job that succeeded"
ask /healthz >/dev/null

say "stop: SIGTERM to the container's first program"
kill -TERM "$first"
for _ in $(seq 120); do
  kill -0 "$first" 2>/dev/null || break
  sleep 0.5
done
kill -0 "$first" 2>/dev/null && die "it did not stop within a minute"
wait "$service" && code=0 || code=$?
service=
[[ $code -eq 0 ]] || { tail -30 "$scratch/daemon.log" >&2; die "it stopped with exit code $code"; }
say "done: built, trained, scraped, stopped cleanly"
