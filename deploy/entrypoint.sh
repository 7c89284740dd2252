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

stop() {
  signalled=yes
  trap 'signalled=yes' TERM INT
  orch down --stop-jobs || true
  # A daemon that does not listen yet, or no longer, has not been asked by that; one that ends already takes no harm.
  kill -TERM "$daemon" 2>/dev/null || true
  trap 'signalled=yes; kill -TERM "$daemon" 2>/dev/null || true' TERM INT
}

# Until the daemon's process id is known, a signal is only noted: there is nothing yet that it could be passed on to.
signalled=no
trap 'signalled=yes' TERM INT
"$@" &
daemon=$!
trap stop TERM INT
if [ "$signalled" = yes ]; then
  stop
fi

# `wait` returns early when a signal is handled, with a code that is not the daemon's: then it is asked again. 127: the
# daemon's end was reported before (or the shell could not start it).
code=127
while :; do
  signalled=no
  wait "$daemon" && ended=0 || ended=$?
  if [ "$ended" -eq 127 ]; then
    break
  fi
  code=$ended
  if [ "$signalled" = no ]; then
    break
  fi
done
exit "$code"
