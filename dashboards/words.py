"""What panels say when they have no data: what is missing, and where to look. Never a calm 0 where something is broken."""

from typing import Final

NO_DAEMON: Final = "No samples from the orch daemon: is it running and scraped? (orch doctor)"
NO_EXPORTER: Final = "No GPU samples: is the exporter of this node scraped? (orch doctor)"
NO_RULES: Final = "No recorded values: is orch.rules.yml loaded, and does a job hold two GPUs or more?"
NO_JOB: Final = "No such job in this time range (series of a job end 15 minutes after it)"
NOT_REPORTED: Final = "The script reports nothing of this kind (see docs: reporting progress)"
NO_CHECKPOINT: Final = "No checkpoint yet"
NO_STARTS: Final = "No job started in this time range"
NO_HELD_TIME: Final = "No job held a GPU in this time range"
NOT_MEASURED: Final = "This GPU or its driver does not measure that"
NO_EVENTS: Final = "None in this time range (only GPUs that report such events are counted)"
NO_FINDINGS: Final = "No finding is open (as long as the daemon is scraped)"
NO_PRICES: Final = "Set a price at the top of the board (and let a job hold a GPU)"
