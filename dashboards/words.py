"""Texts of panels without data: each says what is missing and where to look, so that no failure is shown as 0."""

from typing import Final

NO_DAEMON: Final = "No samples from the orch daemon: is it running and scraped? (orch doctor)"
NO_EXPORTER: Final = "No GPU samples: is the exporter of this node scraped? (orch doctor)"
NO_RULES: Final = "No recorded values: is orch.rules.yml loaded, and does a job hold two GPUs or more?"
NO_BALANCE: Final = "No balance from the orch daemon: does a job hold two GPUs or more? (orch doctor)"
NO_JOB: Final = "No such job in this time range (the series of a job end 15 minutes after the job)"
NOT_REPORTED: Final = "The script reports nothing of this kind (see docs: reporting progress)"
NO_CHECKPOINT: Final = "No checkpoint yet"
NO_STARTS: Final = "No job started in this time range"
NO_HELD_TIME: Final = "No job held a GPU in this time range"
NOT_MEASURED: Final = "This GPU or its driver does not measure that"
NO_EVENTS: Final = "None in this time range (only GPUs that report such events are counted)"
NO_FINDINGS: Final = "No finding is open (valid only while the daemon is scraped)"
NO_PRICES: Final = "Set a price at the top of the board; costs appear once a job holds a GPU"
