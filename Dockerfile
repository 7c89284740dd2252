# syntax=docker/dockerfile:1
# orch in a container: the daemon, or a Ray node for its jobs (deploy/compose.yaml, deploy/kubernetes).
#
#   docker build -t orch .                              CPU: needs an index with torch's CPU build, see TORCH_INDEX_URL
#   docker build -t orch:cuda --build-arg VARIANT=cuda .
#
# BASE is any Debian image with python3 (3.11 or newer) and its venv module. deploy/pin-images writes its digest behind its tag.
ARG BASE=python:3.11-slim-bookworm

# ------------------------------------------------------------------------------------------------------------- build
FROM ${BASE} AS build
# cpu or cuda. cuda takes torch with its CUDA libraries from the package index; only the driver comes from the host.
ARG VARIANT=cpu
# An index that has torch's CPU builds (PyTorch's page "Get started" names it). Not needed if deploy/wheels contains one.
ARG TORCH_INDEX_URL=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
# Everything but torch is installed by the hashes of two files (make pins), without resolving. Nothing is built that the index has only as source.
ENV HASHED="install --no-cache-dir --no-deps --only-binary=:all: --require-hashes --requirement"
# What builds the wheel and lists what the image contains; it is not part of the image.
COPY deploy/build-requirements.txt ./deploy/
RUN python3 -m venv /opt/build && /opt/build/bin/pip ${HASHED} deploy/build-requirements.txt
# pip compiles what it installs: the container's user cannot write there, and would compile again at every start.
COPY deploy/requirements.txt ./deploy/
RUN python3 -m venv /opt/orch && /opt/orch/bin/pip ${HASHED} deploy/requirements.txt
COPY constraints.txt ./
COPY deploy/wheels/ /wheels/
# torch has a layer of its own: it is the largest part of the image.
# A CPU build has the local version +cpu: it is asked for by that name, so that neither variant gets the other's build.
RUN pinned="$(sed -n 's/^torch==//p' constraints.txt)" \
    && case "${VARIANT}" in \
        cpu) wanted="torch==${pinned}+cpu" ;; \
        cuda) wanted="torch==${pinned},!=${pinned}+cpu" ;; \
        *) echo "VARIANT=${VARIANT} is neither cpu nor cuda" >&2; exit 1 ;; \
    esac \
    && if [ "${VARIANT}" = cpu ] && [ -z "${TORCH_INDEX_URL}" ] && ! ls /wheels/torch-*.whl >/dev/null 2>&1; then \
        echo "VARIANT=cpu needs TORCH_INDEX_URL, an index with torch's CPU builds, or a wheel of one in deploy/wheels" >&2; exit 1; \
    fi \
    && /opt/orch/bin/pip install --no-cache-dir --find-links /wheels --constraint constraints.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} "${wanted}"
COPY pyproject.toml README.md LICENSE ./
COPY deploy/published.py deploy/
COPY orchestrator/ orchestrator/
COPY examples/digits/ examples/digits/
# Files for administrators that the wheel includes.
COPY docs/operations/ docs/operations/
COPY deploy/backup.py deploy/
COPY deploy/alertmanager/alertmanager.yml deploy/alertmanager/
COPY deploy/grafana/ deploy/grafana/
COPY deploy/kubernetes/ deploy/kubernetes/
COPY deploy/prometheus/ deploy/prometheus/
COPY deploy/systemd/ deploy/systemd/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/orch/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
    && /opt/orch/bin/pip check
# The software bill of materials: every Python package that is installed, in CycloneDX's JSON, checked against its schema.
RUN /opt/build/bin/cyclonedx-py environment --validate --output-reproducible --output-file /opt/orch/share/orch/sbom.cdx.json /opt/orch/bin/python

# -------------------------------------------------------------------------------------------------------------- sbom
# For taking the bill of materials out of a build: docker build --target sbom --output out/image .
FROM scratch AS sbom
COPY --from=build /opt/orch/share/orch/sbom.cdx.json /

# --------------------------------------------------------------------------------------------------------------- run
FROM ${BASE} AS run
ARG VARIANT=cpu
LABEL org.opencontainers.image.title="orch" \
      org.opencontainers.image.description="Runs training jobs on the GPUs of one machine or of a Ray cluster" \
      org.opencontainers.image.licenses="Apache-2.0" \
      orch.variant="${VARIANT}"
# hadolint ignore=DL3008  # the base image pins Debian's release; its security updates must not be pinned away
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 orch \
    && useradd --uid 10001 --gid orch --home-dir /var/lib/orch --shell /usr/sbin/nologin orch \
    && install -d -o orch -g orch -m 0700 /var/lib/orch
COPY --from=build /opt/orch /opt/orch
COPY --chmod=0755 deploy/entrypoint.sh /usr/local/bin/orch-entrypoint
ENV PATH=/opt/orch/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ORCH_HOME=/var/lib/orch \
    ORCH_LOG_FORMAT=json \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/orch
VOLUME ["/var/lib/orch"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('ORCH_METRICS_PORT') or 9476}/healthz\", timeout=4)"]
# tini reaps processes that outlive their parents, and forwards signals.
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/orch-entrypoint"]
CMD ["orch", "serve"]
