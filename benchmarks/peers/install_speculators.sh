#!/usr/bin/env bash
# speculators in a virtual environment of its own, outside the repository: install_speculators.sh FOLDER (about 2 minutes, 1.5 GB).
# Its own dependencies would bring CUDA builds; --no-deps and the list below do not.
set -euo pipefail
folder=${1:?give a folder for the virtual environment}
"${PYTHON:-python3.11}" -m venv "$folder"
install=("$folder/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
"${install[@]}" --no-deps speculators==0.9.0 hs-connectors==0.9.0
"${install[@]}" aiohttp click 'datasets<=5.1.0' httpx huggingface-hub 'loguru<=0.7.3' 'numpy<=2.5.4' openai protobuf psutil pydantic \
  pydantic-settings rich safetensors tqdm 'transformers<=5.19.0' typer
