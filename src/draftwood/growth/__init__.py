"""Policies that turn suggestions into a tree."""
