"""Trace, profile, solve, apply to a fake copy, judge, tighten: the way to a plan."""
