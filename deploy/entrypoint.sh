#!/bin/sh
# The first program of a container, under tini.
#
# A daemon that starts its own Ray takes its jobs down with the container, whatever it does: so on SIGTERM they are asked to
# save and go back to the queue first, and continue at the next start. A daemon of a Ray elsewhere (--ray-address) just
# stops; its jobs step on. Everything else is run as it is.
set -eu

own_ray=yes
for argument in "$@"; do
  case "$argument" in
    --ray-address | --ray-address=*) own_ray=no ;;
  esac
done

if [ "${1:-}" != orch ] || [ "${2:-}" != serve ] || [ "$own_ray" = no ]; then
  exec "$@"
fi

daemon=
stop() {
  trap '' TERM INT
  orch down --stop-jobs || kill -TERM ${daemon:+"$daemon"} 2>/dev/null || true
}
trap stop TERM INT
"$@" &
daemon=$!
# wait returns early when a signal is handled; the daemon's own end is what counts.
code=0
while kill -0 "$daemon" 2>/dev/null; do
  wait "$daemon" && code=0 || code=$?
done
exit "$code"
