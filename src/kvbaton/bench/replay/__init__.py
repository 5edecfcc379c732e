"""Fault schedules of the simulator on real processes: bare instances, signals, cut links, held messages, and the same rules."""
