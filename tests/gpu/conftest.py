"""Kernels on a GPU, test_*_gpu.py: collected only where PyTorch finds one."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*_gpu.py"]
