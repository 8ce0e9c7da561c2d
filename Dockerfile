# Image of Penstock for Kubernetes and Compose: the wheel in an environment of its own, no root, nothing to write.
#   docker build -t penstock --build-arg COMMIT="$(git describe --always --dirty --exclude='*') of $(git log -1 --format=%cs)" .
#   docker build --build-arg BASE=python:3.12-slim@sha256:DIGEST -t penstock .     a base that can't change
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG COMMIT=
WORKDIR /src
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY src src
# The wheel and what it needs go into one folder, so that the image has no sources and no tools to build them.
RUN python3 -m venv /opt/penstock \
 && PENSTOCK_COMMIT="$COMMIT" /opt/penstock/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && /opt/penstock/bin/python -m pip install --no-cache-dir "$(echo /wheels/penstock-*.whl)[audit,jwt,kubernetes,object,otel,picker,plugins]"

FROM ${BASE}
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["penstock"]
