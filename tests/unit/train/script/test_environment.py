"""The settings that a training process reads from its environment."""

import pytest

from orchestrator.train.script.environment import EnvironmentValueError, RankEnvironment, read_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_plain_python_is_rank_0_of_1():
    here = read_environment({})
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size) == (0, 1, 0, 1)
    assert (here.job_id, here.attempt, here.progress_path, here.resume_from) == ("", None, None, None)
    assert here.checkpoint_dir == "checkpoints"
    assert (here.keep, here.score_attribute, here.score_order) == (3, None, "max")


def test_torchrun_says_who_this_is():
    here = read_environment(TORCHRUN)
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size) == (3, 8, 1, 2)


def test_orch_adds_its_own():
    here = read_environment(
        {
            **TORCHRUN,
            "ORCH_JOB_ID": "digits-k3f9q2",
            "ORCH_ATTEMPT": "4",
            "ORCH_PROGRESS_PATH": "/dev/shm/p",
            "ORCH_PREVIOUS_STEP": "120",
            "ORCH_CHECKPOINT_DIR": "/c",
            "ORCH_RESUME_FROM": "/other/step-000000000001-a1",
            "ORCH_CHECKPOINT_KEEP": "all",
            "ORCH_CHECKPOINT_SCORE_ATTRIBUTE": "loss",
            "ORCH_CHECKPOINT_SCORE_ORDER": "min",
            "ORCH_DEVICE": "cuda:2",
        }
    )
    assert here == RankEnvironment(
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        job_id="digits-k3f9q2",
        attempt=4,
        token=here.token,
        device="cuda:2",
        progress_path="/dev/shm/p",
        previous_step=120,
        checkpoint_dir="/c",
        resume_from="/other/step-000000000001-a1",
        keep=None,
        score_attribute="loss",
        score_order="min",
    )


def test_the_token_is_equal_on_all_ranks_and_differs_between_runs():
    job = {"WORLD_SIZE": "2", "ORCH_JOB_ID": "a-222222", "ORCH_ATTEMPT": "1"}
    first = read_environment({**job, "RANK": "0"}).token
    assert first == read_environment({**job, "RANK": "1"}).token
    assert first != read_environment({**job, "RANK": "0", "ORCH_ATTEMPT": "2"}).token
    plain = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    alone = read_environment({**plain, "RANK": "0"}).token
    assert alone == read_environment({**plain, "RANK": "1"}).token
    assert alone != read_environment({**plain, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}).token
    assert alone != read_environment({**plain, "RANK": "0", "MASTER_PORT": "29501"}).token


def test_there_is_no_token_where_ranks_have_nothing_in_common():
    assert read_environment(TORCHRUN).token is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not one of WORLD_SIZE=2"),
        ({"ORCH_ATTEMPT": "1.5"}, "ORCH_ATTEMPT='1.5'"),
        ({"ORCH_CHECKPOINT_KEEP": "most"}, "ORCH_CHECKPOINT_KEEP='most'"),
    ],
)
def test_nonsense_is_refused_by_name(environ, message):
    with pytest.raises(EnvironmentValueError, match=message):
        read_environment(environ)
