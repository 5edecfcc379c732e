"""SGLang servers on this machine: their environment, their model, their command lines, and the engine's side of the seam."""
