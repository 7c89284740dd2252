"""The trackers that a job can name: their packages, and the variables that they read. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECT: Final = "orch"
"""The project, or experiment, of jobs that name none."""

NETWORK: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPackage:
    """Requirements of a tracker: ``packages`` by the module that each is imported as, and prefixes of variables."""

    name: str
    packages: Mapping[str, str]
    prefixes: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Return the packages that cannot be imported by this interpreter."""
        return tuple(package for module, package in self.packages.items() if find_spec(module) is None)


TRACKERS: Final = {
    one.name: one
    for one in (
        TrackerPackage(name="wandb", packages={"wandb": "wandb"}, prefixes=("WANDB_",)),
        TrackerPackage(name="trackio", packages={"trackio": "trackio"}, prefixes=("TRACKIO_",)),
        TrackerPackage(name="tensorboard", packages={"tensorboard": "tensorboard"}),
        TrackerPackage(
            name="mlflow",
            packages={"mlflow": "mlflow-skinny", "sqlalchemy": "sqlalchemy", "alembic": "alembic"},
            prefixes=("MLFLOW_", "DATABRICKS_"),
        ),
    )
}


def settings_of(name: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return those of a job's variables that this tracker, or its connection to its server, reads."""
    prefixes = TRACKERS[name].prefixes
    return {key: value for key, value in values.items() if key in NETWORK or (prefixes and key.startswith(prefixes))}
