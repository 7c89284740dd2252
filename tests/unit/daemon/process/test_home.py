"""The daemon's home belongs to its user alone: made private, closed if it is open, refused if it cannot be closed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import Level
from orchestrator.daemon.jobs import tidying as kept
from orchestrator.daemon.process import doctor
from orchestrator.daemon.process.home import prepare_home
from orchestrator.runtime.nodes import directories as node_dir
from orchestrator.runtime.nodes.directories import namespace
from orchestrator.spec.settings import Settings
from tests.support import disks
from tests.support.users import OTHER, as_root, as_user

VICTIM = 54321


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def shared() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="orch-shared-", dir="/tmp"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def old_home(home: Path) -> Settings:
    """Make a home as an earlier version left it under umask 022."""
    settings = Settings(home=home)
    job = settings.paths.job("job-aaaaaa")
    for directory in (settings.paths.run, settings.paths.ray / "s", job / "work", job / "logs"):
        directory.mkdir(parents=True)
    for file in (settings.paths.store, settings.paths.daemon_log, job / "metrics.jsonl", job / "work" / "data"):
        file.write_text("kept")
    (settings.paths.ray / "s").chmod(0o777)
    for path in (home, settings.paths.run, settings.paths.jobs, job, job / "logs"):
        path.chmod(0o755)
    return settings


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_new_home_and_its_parents_are_private(tmp_path: Path, umask: int) -> None:
    home = tmp_path / "new" / "home"
    before = os.umask(umask)
    try:
        prepare_home(Settings(home=home))
    finally:
        os.umask(before)
    made = [home.parent, home, *home.iterdir()]
    assert {path.name for path in made} == {"new", "home", "run", "ray", "jobs", "blobs"}
    assert {mode(path) for path in made} == {0o700}


def test_an_open_home_of_an_earlier_version_is_closed_and_opens(tmp_path: Path) -> None:
    settings = old_home(tmp_path / "home")
    prepare_home(settings)
    job = settings.paths.job("job-aaaaaa")
    closed = [settings.home, *settings.home.iterdir(), *settings.paths.run.iterdir(), settings.paths.ray / "s", job]
    assert not [path for path in (*closed, *job.iterdir()) if mode(path) & 0o077]
    assert settings.paths.store.read_text() == "kept"
    assert mode(job / "work" / "data") == 0o644, "the user's own files keep their modes"


def test_a_home_for_a_group_can_be_passed_through_and_not_read(tmp_path: Path) -> None:
    settings = old_home(tmp_path / "home")
    prepare_home(settings, traversable=True)
    assert (mode(settings.home), mode(settings.paths.run), mode(settings.paths.jobs)) == (0o711, 0o711, 0o700)


def test_a_directory_that_is_no_home_is_not_closed(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "lib").mkdir()
    (tmp_path / "var").chmod(0o755)
    with pytest.raises(RefusedError, match="not a home of orch") as caught:
        prepare_home(Settings(home=tmp_path / "var"))
    assert mode(tmp_path / "var") == 0o755
    assert "chmod go-rwx" in caught.value.hint
    assert [path.name for path in (tmp_path / "var").iterdir()] == ["lib"]


@as_root
def test_a_home_that_another_user_made_first_is_refused(shared: Path) -> None:
    home = shared / "home"

    def attack() -> None:
        home.mkdir()
        home.chmod(0o777)
        (home / "run").symlink_to(shared / "elsewhere")

    as_user(OTHER, attack)
    said = as_user(VICTIM, lambda: prepare_home(Settings(home=home, uid=VICTIM)))
    assert said.startswith("RefusedError: ")
    assert f"belongs to user {OTHER}" in said
    assert not (shared / "elsewhere").exists()


@as_root
def test_the_mount_point_of_a_volume_that_belongs_to_root_serves_as_a_home(tmp_path: Path, shared: Path) -> None:
    """Kubernetes gives a volume to a group of the pod (fsGroup), not to its user."""
    home = shared / "volume"
    home.mkdir()
    (home / "lost+found").mkdir(mode=0o700)
    os.chown(home, 0, VICTIM)
    home.chmod(0o2775)
    home.parent.chmod(0o755)
    assert as_user(VICTIM, lambda: prepare_home(Settings(home=home, uid=VICTIM))) == "None"
    assert {path.name: mode(path) & 0o777 for path in home.iterdir() if path.name != "lost+found"} == dict.fromkeys(
        ("run", "ray", "jobs", "blobs"), 0o700
    )
    home.chmod(0o2777)
    assert "RefusedError" in as_user(VICTIM, lambda: prepare_home(Settings(home=home, uid=VICTIM)))


def what_doctor_says(settings: Settings, shared: Path) -> list[str]:
    return [f"{f.what}: {f.remedy}" for f in doctor._privacy(settings, shared_memory=shared) if f.level is not Level.OK]


def test_doctor_says_what_others_can_get_at(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    settings = old_home(tmp_path / "home")
    (said,) = what_doctor_says(settings, shared)
    assert "other users can read or write" in said
    assert f"chmod go-rwx {settings.home}" in said
    settings.home.chmod(0o711)
    (said,) = what_doctor_says(settings, shared)
    assert "other users can get at" in said
    prepare_home(settings)
    assert not what_doctor_says(settings, shared)
    for directory in (settings.home, settings.paths.run):  # as with a group's access
        directory.chmod(0o710)
    assert not what_doctor_says(settings, shared)
    settings.paths.run.chmod(0o750)
    (said,) = what_doctor_says(settings, shared)
    assert f"other users can get at {settings.paths.run}" in said
    settings.paths.run.chmod(0o700)
    (shared / f"orch-{os.getuid()}").symlink_to(tmp_path)
    pages = node_dir.page_directory(namespace(settings.home), shared_memory=shared)
    pages.mkdir()
    pages.chmod(0o777)
    assert [said.partition(" ")[0] for said in what_doctor_says(settings, shared)] == [
        str(shared / f"orch-{os.getuid()}"),
        str(pages),
    ]


def test_a_start_on_a_full_disk_has_space_and_inodes_that_were_kept_for_it(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, 200) as where:
        paths = Settings.from_environ({"ORCH_HOME": str(where)}).paths
        kept.keep_start_reserve(paths)
        assert len(list(paths.start_reserve.iterdir())) == kept.START_FILES + 1
        kept.release_start_reserve(paths)
        assert paths.start_reserve.exists(), "there is enough without it"
        ballast = disks.fill(where)
        kept.release_start_reserve(paths)
        assert not paths.start_reserve.exists()
        assert disks.free_bytes(where) >= kept.START_BYTES
        kept.keep_start_reserve(paths)
        assert not paths.start_reserve.exists(), "what is free is for the daemon that starts"
        ballast.unlink()
        kept.keep_start_reserve(paths)
        subprocess.run(["mount", "-o", f"remount,nr_inodes={kept.START_FILES + 10}", str(where)], check=True)
        kept.release_start_reserve(paths)
        assert not paths.start_reserve.exists()


def test_a_home_that_is_read_only_is_refused_with_the_reason(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, 20) as where:
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        with pytest.raises(RefusedError, match="is mounted read-only, so no daemon can start") as refused:
            prepare_home(Settings.from_environ({"ORCH_HOME": str(where)}))
        assert "mount it writable" in refused.value.hint
