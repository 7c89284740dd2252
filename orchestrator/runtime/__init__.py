"""Ray: cluster, node agent, fork server, gang, rank actor, exporter actor, logs; and the runtime in memory."""
