# The service in a container: CUDA's libraries come with the Python wheels, only the driver from the host.
#
#   docker build -t moelet .
#   docker run --gpus all --read-only --tmpfs /tmp -p 8000:8000 -v /models:/models:ro moelet serve /models/NAME
#
# Without --gpus it serves on the CPU; --build-arg TORCH=REQUIREMENT chooses a torch, so also a CPU build of it.

ARG BASE=python:3.12-slim-bookworm

# The dependencies alone, a layer that is built again only when pyproject.toml changes. Torch is resolved
# together with everything else, so that nothing replaces it afterwards.
FROM ${BASE} AS dependencies
ARG TORCH="torch>=2.9"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml ./
COPY src/moelet/__init__.py src/moelet/__init__.py
RUN touch README.md LICENSE \
 && python3 -m venv /opt/moelet \
 && /opt/moelet/bin/python -m pip install "${TORCH}" . \
 && /opt/moelet/bin/python -m pip uninstall --yes moelet

FROM dependencies AS wheel
COPY . .
RUN /opt/moelet/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${BASE}
COPY --from=dependencies /opt/moelet /opt/moelet
COPY --from=wheel /dist /dist
RUN /opt/moelet/bin/python -m pip install --no-cache-dir --no-deps --no-index /dist/*.whl && rm -rf /dist \
 && /opt/moelet/bin/python -m moelet.graphs.ahead /opt/moelet/cubins sm_90a

ENV PATH=/opt/moelet/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    MOELET_HOST=0.0.0.0 \
    MOELET_CACHE_DIR=/tmp/moelet \
    MOELET_CUBIN_DIR=/opt/moelet/cubins \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/health' % os.environ.get('MOELET_PORT', '8000'), timeout=2)"]
ENTRYPOINT ["moelet"]
CMD ["serve", "--demo"]
