"""Keys of other systems: each leads to an existing key, and the known ones get the right hint."""

import pytest

from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import SpecError
from orchestrator.spec.reader import reading as words
from orchestrator.spec.reader.reading import all_keys, snake

HEAD = "name: digits\nentrypoint: python train.py\n"


def hint_for(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_job(HEAD + text)
    return "; ".join(problem.hint for problem in caught.value.problems)


def test_every_foreign_word_leads_to_a_key_of_ours() -> None:
    assert set(words._SAME_IDEA) <= set(all_keys())


def test_no_foreign_word_stands_twice_or_is_one_of_ours_in_its_place() -> None:
    everything = [word for listed in words._SAME_IDEA.values() for word in listed.split()] + list(words._NO_SUCH_IDEA)
    assert sorted(everything) == sorted(set(everything))
    assert all(word == snake(word) for word in everything)
    assert set(everything) & {key for key in all_keys() if "." not in key} == set()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        # SkyPilot
        ("workdir: .", "working_dir"),
        ("envs: {}", "env"),
        ("run: x", "entrypoint"),
        ("setup: pip install x", "runtime_env.pip"),
        ("num_nodes: 2", "orch places ranks"),
        ("file_mounts: {}", "working_dir are copied"),
        ("resources: {accelerators: H100:8}", "resources.resources_per_worker.gpu"),
        ("resources: {cpus: 4}", "resources.resources_per_worker.cpu"),
        ("resources: {memory: 4GB}", "resources.resources_per_worker.memory"),
        ("resources: {use_spot: true}", "preemptible"),
        ("resources: {job_recovery: {}}", "retry"),
        # dstack
        ("type: task", "there is one type of job"),
        ("commands: [x]", "entrypoint"),
        ("nodes: 2", "orch places ranks"),
        ("tags: {}", "labels"),
        # Ray
        ("gpus_per_worker: 1", "resources.resources_per_worker.gpu"),
        ("resources: {gpus_per_worker: 1}", "resources.resources_per_worker.gpu"),
        ("num_workers: 4", "resources.num_workers"),
        ("max_failures: 3", "retry.max_restarts.user"),
        ("checkpoint: {num_to_keep: 3}", "did you mean keep?"),
        ("storage_path: /x", "checkpoint.storage_path"),
        ("runtime_env: {env_vars: {}}", "did you mean env?"),
        ("metadata: {}", "labels"),
        # Slurm
        ("time: 24:00:00", "max_duration"),
        ("gpus: 4", "resources.resources_per_worker.gpu"),
        ("job-name: x", "name"),
        ("ntasks: 4", "resources.num_workers"),
        ("cpus-per-task: 4", "resources.resources_per_worker.cpu"),
        ("partition: x", "queue"),
        ("array: 1-4", "matrix"),
        ("mem: 8G", "resources.resources_per_worker.memory"),
        # Kubernetes
        ("apiVersion: v1", "Kubernetes manifest"),
        ("numProcPerNode: 4", "resources.num_workers"),
        ("activeDeadlineSeconds: 10", "max_duration"),
        ("backoffLimit: 3", "retry.max_restarts.user"),
        ("ttlSecondsAfterFinished: 3", "orch prune"),
        # Determined
        ("hyperparameters: {}", "matrix.parameters"),
        ("resources: {slots_per_trial: 4}", "did you mean num_workers?"),
        ("resources: {resource_pool: x}", "did you mean queue?"),
        ("max_restarts: 3", "retry.max_restarts"),
        ("searcher: {}", "matrix"),
        # torchrun and others
        ("nproc_per_node: 4", "resources.num_workers"),
        ("timeout-minutes: 4", "max_duration"),
        ("needs: [a]", "depends_on"),
        ("command: x", "entrypoint"),
        # typing errors
        ("entrypont: x", "did you mean entrypoint?"),
        ("resouces: {}", "did you mean resources?"),
        ("resources: {num_worker: 4}", "did you mean num_workers?"),
        ("gpus_per_wrker: 1", "did you mean resources.resources_per_worker.gpu?"),
        ("retry: {max_no_progres: 3}", "did you mean max_no_progress?"),
        ("keep: 3", "it belongs elsewhere: checkpoint.keep"),
        ("resources: {gpu: 3}", "it belongs elsewhere: resources.resources_per_worker.gpu"),
    ],
)
def test_known_words_get_the_key_that_means_the_same(text: str, hint: str) -> None:
    assert hint in hint_for(text)
