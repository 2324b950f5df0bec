"""Actors that die, hang or report: supervision, stack dumps, deadlines of calls, usage."""
