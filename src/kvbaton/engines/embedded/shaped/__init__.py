"""Small models of every kind of cache, cut into tensor-parallel and pipeline-parallel ranks."""
