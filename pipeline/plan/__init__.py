"""What a run on GPUs will take, on paper: memory, disk and GPU-hours from shapes alone. `python -m pipeline.plan`."""
