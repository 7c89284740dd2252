"""The spec of a job, read from the event of its submission, and the differences of two specs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.events import GitState
from orchestrator.core.stored import event_body, event_from
from orchestrator.daemon.requests.files import MASK, archived_files, spec_diff, spec_view
from orchestrator.spec.job import change_spec, parse_job
from orchestrator.spec.problems import SpecError
from tests.support.records import replace
from tests.unit.core.builders import submission

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.events import JobSubmitted

HOOK = "https://hooks.example.org/services/T0/secret"
JOB = f"""
name: digits
entrypoint: python train.py --lr 0.1
env: {{A: "true", API_TOKEN: hush, B: "1e-3"}}
secrets: [HF_TOKEN]
max_duration: 1h30m
trainer: {{batch_size: 8, timeout: 5m}}
notify: [{{url: "{HOOK}", on: [FAILED]}}]
"""
COMMIT = "a" * 40


def submitted(text: str = JOB, **fields: object) -> JobSubmitted:
    return replace(submission(parse_job(text)), **fields)  # type: ignore[arg-type]


def test_a_spec_is_told_as_it_was_resolved() -> None:
    view = spec_view(submitted(python="/opt/python", snapshot="d" * 64, git=GitState(commit=COMMIT, dirty=True)))
    assert view.command == ("/opt/python", "train.py", "--lr", "0.1")
    assert (view.archive, view.git and view.git.dirty) == ("d" * 64, True)
    assert view.spec["priority"] == 50
    assert type(view).from_json(json.loads(json.dumps(view.to_json()))) == view


def test_what_looks_like_a_secret_is_masked_everywhere() -> None:
    view = spec_view(submitted())
    assert view.masked == ("env.API_TOKEN", "notify.0.url")
    assert view.env["API_TOKEN"] == view.env["HF_TOKEN"] == MASK
    told = json.dumps(view.to_json())
    assert "hush" not in told
    assert HOOK not in told
    other = submitted(JOB.replace("hush", "whisper").replace("T0", "T1"))
    told = json.dumps(spec_diff(submitted(), other, None).to_json())
    assert "env.API_TOKEN" in told
    assert not any(word in told for word in ("hush", "whisper", "services"))


def test_users_and_passwords_of_addresses_are_masked_and_so_are_more_names() -> None:
    names = ("OPENAI_APIKEY", "PGPASS", "GH_PAT", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "BASIC_AUTH")
    text = JOB.replace("--lr 0.1", "--db postgres://ada:hush@db/runs?x=y@z")
    text = text.replace(
        "API_TOKEN:",
        f"PROXY: 'http://ada:p@hush@proxy:3128/', {''.join(f'{name}: hush, ' for name in names)}API_TOKEN:",
    )
    view = spec_view(submitted(text))
    assert "hush" not in json.dumps(view.to_json())
    assert view.command[-1] == "postgres://***@db/runs?x=y@z"
    assert view.env["PROXY"] == "http://***@proxy:3128/"
    assert {"entrypoint", "env.PROXY", *(f"env.{name}" for name in names)} < set(view.masked)
    told = json.dumps(spec_diff(submitted(text), submitted(text.replace("hush", "whisper")), None).to_json())
    assert not any(word in told for word in ("hush", "whisper"))
    assert "env.PROXY" in told


def test_the_yaml_means_the_same_job() -> None:
    plain = JOB.replace("API_TOKEN", "LEVEL").replace(HOOK, "https://hooks.example.org")
    assert parse_job(spec_view(submitted(plain)).yaml) == parse_job(plain)


def test_a_diff_names_keys_and_files() -> None:
    git = GitState(commit=COMMIT)
    after = submitted(JOB.replace("0.1", "0.2"), git=git)
    files = ({"a.py": "1", "b.py": "1", "c.py": "1"}, {"b.py": "2", "c.py": "1", "d.py": "1"})
    found = spec_diff(submitted(), after, files)
    assert {(v.key, v.before, v.after) for v in found.values} == {
        ("entrypoint", "python train.py --lr 0.1", "python train.py --lr 0.2"),
        ("(git commit)", None, COMMIT),
    }
    assert [(f.path, f.change) for f in found.files] == [("a.py", "removed"), ("b.py", "changed"), ("d.py", "added")]
    assert spec_diff(after, after, None).values == ()


def test_files_of_an_archive(tmp_path: Path) -> None:
    manifest = tmp_path / "m"
    entries = [{"path": "d", "type": "directory"}, {"path": "a", "type": "file", "mode": 384, "digest": "x"}]
    manifest.write_text(json.dumps({"version": 1, "entries": entries}))
    assert archived_files(manifest) == {"a": "384 x"}


def test_a_spec_is_changed_as_by_the_submission_s_overrides() -> None:
    spec = parse_job(JOB)
    changed = change_spec(spec, ["resources.num_workers=4", "env.A=x", "max_duration=2h"])
    assert changed == parse_job(JOB, overrides=["resources.num_workers=4", "env.A=x", "max_duration=2h"])
    for bad in ("max_duration=2", "bogus=1", "resources.num_workers=0", "matrix"):
        with pytest.raises(SpecError):
            change_spec(spec, [bad])


def test_the_git_state_is_stored() -> None:
    event = submitted(git=GitState(commit=COMMIT, branch="main", dirty=True))
    body = json.loads(json.dumps(event_body(event)))
    assert event_from(event.kind, body, job_id=event.job_id, at=event.at, cause="") == event
    del body["git"]
    assert event_from(event.kind, body, job_id=event.job_id, at=event.at, cause="") == replace(event, git=None)
