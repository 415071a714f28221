#!/usr/bin/env bash
# specforge in a virtual environment of its own, outside the repository: install_specforge.sh FOLDER (about 2 minutes, 2.3 GB).
# Its own dependencies would bring CUDA builds; --no-deps and the list below do not.
set -euo pipefail
folder=${1:?give a folder for the virtual environment}
"${PYTHON:-python3.11}" -m venv "$folder"
install=("$folder/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
"${install[@]}" --no-deps specforge==0.2.0 yunchang==0.6.4 triton==3.7.0
"${install[@]}" accelerate datasets huggingface-hub numpy openai-harmony psutil pydantic pyyaml requests safetensors tensorboard tqdm \
  transformers==5.8.1 typing-extensions wandb
