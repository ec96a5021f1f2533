# A CPU image with everything that run_scripts/setup.sh installs. From the root of a checkout:
#
#   docker build -f run_scripts/container/cpu.Dockerfile -t mugrpo-megatron-cpu .
#   docker run --rm --ipc host -v "$PWD/runs:/mugrpo/runs" mugrpo-megatron-cpu
#
# The second trains the quickstart and leaves runs/quickstart/report.html. Podman takes the same words. --ipc host: engine
# and learner share memory by name, and a container's own /dev/shm holds 64 MB. Written without a container engine at
# hand: checked by reading, never built.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /mugrpo
COPY pyproject.toml setup.py README.md LICENSE ./
COPY docs ./docs
COPY run_scripts ./run_scripts
COPY mugrpo_megatron ./mugrpo_megatron
COPY checkpoints_convert ./checkpoints_convert
RUN run_scripts/setup.sh --cpu
ENV PATH=/mugrpo/.venv/bin:${PATH}
CMD ["run_scripts/quickstart.sh"]
