"""Scripts for the environments of other packages, where this directory is on the path, and must hold nothing else."""
