# The service in a container: CUDA's libraries come with the Python wheels, only the driver from the host.
#
#   docker build -t moelet .
#   docker run --gpus all --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 -v /models:/models:ro moelet serve /models/NAME
#
# Without a GPU it serves on the CPU. docs/deployment.md has compose and Kubernetes, and how to try an image.

ARG BASE=python:3.12-slim-bookworm

# The dependencies alone, so that their layer changes with pyproject.toml and not with the code. Torch is resolved
# together with everything else, so that nothing replaces it afterwards; constraints.txt, where there is one, pins all.
FROM ${BASE} AS dependencies
ARG TORCH="torch>=2.9"
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# A time of its own makes wheels and byte code the same from build to build; zip knows none before 1980.
ENV SOURCE_DATE_EPOCH=315619200 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml constraints.txt* ./
RUN python3 -m venv /opt/build \
 && python3 -m venv --without-pip /opt/moelet \
 && touch constraints.txt \
 && python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
open('build.txt', 'w').write('\n'.join(p['build-system']['requires'])); \
open('run.txt', 'w').write('\n'.join(p['project']['dependencies']))" \
 && /opt/build/bin/pip install -r build.txt \
 && /opt/build/bin/pip --python /opt/moelet/bin/python install -c constraints.txt "${TORCH}" -r run.txt \
 && /opt/build/bin/pip --python /opt/moelet/bin/python freeze > /opt/moelet/versions.txt

# The package and its compiled kernels, in a tree of their own that is laid over the dependencies.
FROM dependencies AS package
ARG ARCH=sm_90a
COPY . .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && /opt/build/bin/pip --python /opt/moelet/bin/python install --no-deps --no-index --root /package /dist/*.whl
RUN PYTHONPATH="$(echo /package/opt/moelet/lib/python3*/site-packages)" MOELET_CACHE_DIR=/tmp/cache \
    /opt/moelet/bin/python -m moelet.graphs.ahead /package/opt/moelet/cubins "${ARCH}"

FROM ${BASE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="moelet" \
      org.opencontainers.image.description="Mixture-of-experts layers with hot-swappable LoRA adapters, over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=dependencies /opt/moelet /opt/moelet
COPY --from=package /package /
ENV PATH=/opt/moelet/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MOELET_HOST=0.0.0.0 \
    MOELET_PORT=8000 \
    MOELET_CACHE_DIR=/tmp/moelet \
    MOELET_CUBIN_DIR=/opt/moelet/cubins \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python3", "-m", "moelet.service.probe", "/health"]
ENTRYPOINT ["moelet"]
CMD ["serve", "--demo"]
