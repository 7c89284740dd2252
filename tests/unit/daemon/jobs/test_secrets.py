"""The variables that jobs inherit from the daemon's environment."""

from orchestrator.daemon.jobs.secrets import without_secrets


def test_keys_of_the_shell_that_started_the_daemon_stay_with_it() -> None:
    kept = {"PATH": "/bin", "HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de"}
    secret = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MY_CREDENTIALS"), "x")
    assert without_secrets(kept | secret) == kept
