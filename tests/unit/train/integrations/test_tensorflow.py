"""`TF_CONFIG` of ranks that meet at a rendezvous store."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from orchestrator.train.errors import ConfigError, RecoveryTimeoutError
from orchestrator.train.integrations.tensorflow import joined, own_address, set_tf_config


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store: TCPStore, rank: int, world: int) -> dict[str, str]:
    told = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    return {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_every_rank_is_a_worker_with_the_same_cluster_and_its_own_index(store: TCPStore) -> None:
    environs = [environment(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found: list[dict[str, Any]] = list(threads.map(set_tf_config, environs))
    workers = found[0]["cluster"]["worker"]
    assert len(set(workers)) == 3
    assert all(address.startswith("127.0.0.1:") for address in workers)
    assert [one["cluster"]["worker"] for one in found] == [workers] * 3
    assert [one["task"] for one in found] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert [json.loads(environ["TF_CONFIG"]) for environ in environs] == found
    assert set_tf_config(environs[1]) == found[1]  # an existing value is kept


def test_a_restart_has_other_addresses(store: TCPStore) -> None:
    first = set_tf_config(environment(store, 0, 1))
    again = set_tf_config(environment(store, 0, 1) | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again["cluster"]["worker"] != first["cluster"]["worker"]


def test_a_rank_that_does_not_come_is_an_error(store: TCPStore) -> None:
    with pytest.raises(RecoveryTimeoutError, match="not all of 2 ranks arrived"):
        set_tf_config(environment(store, 0, 2), patience=timedelta(seconds=0.1))


def test_outside_of_a_job_there_is_no_rendezvous() -> None:
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"):
        set_tf_config({})


def test_addresses() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert (joined("10.0.0.1", 5), joined("::1", 5)) == ("10.0.0.1:5", "[::1]:5")
