"""Scripts for the environments of other packages: each times planning code as it is installed there, without kvbaton."""
