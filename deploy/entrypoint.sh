#!/bin/sh
# The first program of a container, under tini.
#
# The jobs of a daemon that starts its own Ray end with the container in any case. On SIGTERM they are therefore first asked to
# save and go back to the queue, and continue at the next start. A daemon that uses an existing Ray (--ray-address) just
# stops; its jobs keep running. Every other command is executed unchanged.
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
  # A daemon that does not listen yet, or no longer, has not received that request; the signal does not harm one that already ends.
  kill -TERM "$daemon" 2>/dev/null || true
  trap 'signalled=yes; kill -TERM "$daemon" 2>/dev/null || true' TERM INT
}

# Until the daemon's process id is known, a signal is only recorded: there is no process yet to forward it to.
signalled=no
trap 'signalled=yes' TERM INT
"$@" &
daemon=$!
trap stop TERM INT
if [ "$signalled" = yes ]; then
  stop
fi

# `wait` returns early when a signal is handled, with a code that is not the daemon's, and is then called again. 127: an earlier
# call has reported the daemon's end (or the shell could not start it).
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
