"""What runs beside an engine: coordinator and rank agents as logic without I/O, and a driver that gives them real ports."""
