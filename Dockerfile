# docker build --tag vorox .
# docker run --gpus all --ipc=host --volume $PWD:/work vorox train quickstart
# Run directories and caches are below the current folder, /work: mount it, or they end with the container.
FROM python:3.12-slim

RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vorox
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# torch first: its wheels bring their own CUDA.
RUN pip install --no-cache-dir -c constraints.txt torch \
    && pip install --no-cache-dir -c constraints.txt '.[torch,hf,adapters,dash,tensorboard,http,s3]'

WORKDIR /work
# `docker stop` sends SIGTERM: the run saves and exits with 75.
STOPSIGNAL SIGTERM
ENTRYPOINT ["vorox"]
CMD ["doctor"]
