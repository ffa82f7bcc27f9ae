"""Exact little worlds for the tests: policies small enough that every expectation is a finite sum."""
