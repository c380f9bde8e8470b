#!/usr/bin/env bash
# Makes .venv-bench with Vorox and its peers, and clones the peers that are not packages at fixed commits.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
test -x .venv-bench/bin/python || "$python" -m venv .venv-bench
pip=(.venv-bench/bin/python -m pip --disable-pip-version-check --quiet install)
"${pip[@]}" "$(grep '^torch==' constraints.txt)" -c constraints.txt
"${pip[@]}" -e '.[hf,dash,tensorboard]' playwright -c constraints.txt
"${pip[@]}" accelerate datasets grain array-record boto3 obstore lightning-utilities tifffile requests -c constraints.txt
"${pip[@]}" Brotli catalogue Pillow python-snappy zstd -c constraints.txt # what mosaicml-streaming loads for local files
# These pin older libraries than ours or want torchvision, which the benchmarks do not touch.
"${pip[@]}" --no-deps litdata==0.2.76 litgpt==0.5.13 mosaicml-streaming==0.13.0
"${pip[@]}" lightning 'jsonargparse[signatures]' -c constraints.txt
mkdir -p benchmarks/.peers
clone() { # owner/name commit
    local target=benchmarks/.peers/${1#*/}
    test -d "$target" || git clone --quiet "https://github.com/$1" "$target"
    git -C "$target" checkout --quiet "$2"
}
clone karpathy/nanoGPT 3adf61e1
